"""HumanEval (arXiv:2107.03374) as task folders, for evaluation only: package.py finds the problems, generate.py writes the
folders, checker.py goes into each of them and runs in the grading sandbox."""
