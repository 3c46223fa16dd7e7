"""Writes HumanEval problems as Harbor folders. The same problems give the same bytes."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from everlong.environments.tasks.humaneval.checker import SOLUTION
from everlong.environments.tasks.humaneval.package import Problem, ProblemSet
from everlong.environments.tasks.manifest import SCHEMA_VERSION
from everlong.environments.tasks.toml_writer import write_toml

LICENCE_FILE = "LICENSE"
AGENT_S, VERIFIER_S = 300.0, 90.0
MEMORY_MB = 512
"""More than the checker lets the agent's code have, so that code which wants too much is wrong and not killed unjudged."""

INSTRUCTION = """\
The file {file} holds the beginning of the Python function `{name}`: its signature and a docstring that says what it does.
Complete {file}, so that hidden tests which call `{name}` pass. Keep its name and its arguments; the standard library is there.
"""

VERIFIER = """\
#!/bin/bash
# Runs in the workdir. Writes 1 when every check passes, else 0. Nothing where there is no python3 or no readable check.
# EVERLONG_ROOT is where / lies when there is no isolation; it is not set anywhere else.
here="$(cd "$(dirname "$0")" && pwd)"
verdicts="$EVERLONG_ROOT/logs/verifier"
command -v python3 > /dev/null || {{ echo "the checks need python3"; exit 1; }}
python3 -I -B "$here/checker.py" "$here/checks.py" {name} "$PWD"
code=$?
rm -rf "$verdicts"/* "$verdicts"/.[!.]*  # the agent's code ran as the same user
case $code in
    0) echo 1 > "$verdicts/reward.txt" ;;
    3) exit 1 ;;
    *) echo 0 > "$verdicts/reward.txt" ;;
esac
"""

ORACLE = """\
#!/bin/bash
cp "$(dirname "$0")/{file}" {file}
"""


def make_humaneval(out: Path, found: ProblemSet, count: int | None = None) -> list[Path]:
    """Write the first `count` problems (None: all) into `out`, a folder each, and the licence beside them.

    Raises ValueError for a count that is not there and for a name that is no identifier, FileExistsError where `out` holds
    something already.
    """
    count = len(found.problems) if count is None else count
    if not 1 <= count <= len(found.problems):
        raise ValueError(f"count must be 1 to {len(found.problems)}, the problems of {found.source}; got {count}")
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty: name a new folder")
    contents = [(_folder(out, problem), _contents(problem, found.source)) for problem in found.problems[:count]]
    for folder, files in contents:
        _write(folder, files.items())
    _write(out, [(LICENCE_FILE, found.licence)])
    return [folder for folder, _ in contents]


def _folder(out: Path, problem: Problem) -> Path:
    number = problem.task_id.rpartition("/")[2]
    if not number.isdigit() or not problem.entry_point.isidentifier():
        raise ValueError(f"expected a task_id such as HumanEval/7 and a function's name, got {problem.task_id!r}, {problem.entry_point!r}")  # fmt: skip
    return out / f"humaneval-{int(number):03d}"


def _contents(problem: Problem, source: str) -> dict[str, str]:
    """The task's files. The checks stand behind the prompt, whose helper functions some of them call."""
    name = problem.entry_point
    return {
        "instruction.md": INSTRUCTION.format(file=SOLUTION, name=name),
        "task.toml": write_toml(_manifest(problem, source)),
        "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\nCOPY files/ /app/\n",
        f"environment/files/{SOLUTION}": problem.prompt,
        "tests/test.sh": VERIFIER.format(name=shlex.quote(name)),
        "tests/checker.py": Path(__file__).with_name("checker.py").read_text(encoding="utf-8"),
        "tests/checks.py": f"{problem.prompt}\n\n{problem.test}",
        "solution/solve.sh": ORACLE.format(file=SOLUTION),
        f"solution/{SOLUTION}": problem.prompt + problem.canonical_solution,
    }


def _manifest(problem: Problem, source: str) -> dict[str, object]:
    number = int(problem.task_id.rpartition("/")[2])
    return {
        "schema_version": SCHEMA_VERSION,
        "task": {"name": f"humaneval/{number}"},
        "metadata": {
            "id": f"humaneval/{number}",
            "kind": "humaneval",
            "evaluate_only": True,
            "source": f"{problem.task_id} of {source}",
            "licence": f"MIT, see {LICENCE_FILE} beside the tasks",
        },
        "agent": {"timeout_sec": AGENT_S},
        "verifier": {"timeout_sec": VERIFIER_S},
        "environment": {"network_mode": "no-network", "memory_mb": MEMORY_MB, "storage_mb": 256},
    }


def _write(folder: Path, files: Iterable[tuple[str, str]]) -> None:
    for name, content in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        path.chmod(0o644)
