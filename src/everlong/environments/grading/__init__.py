"""Grading: a task's own verifier runs on a copy of what the agent left behind and gives a verdict, or says why not."""
