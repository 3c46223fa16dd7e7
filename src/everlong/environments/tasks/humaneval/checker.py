"""Runs a problem's checks against what the agent left behind: `python3 -I checker.py checks.py NAME WORKDIR`.

This file is copied into every task and runs in the grading sandbox, on any Python from 3.9 on; it imports nothing of ours.
The checks run in this process, the agent's code in a child that only ever sees arguments and only ever answers with plain
values as text: so an answer is compared by this process, whatever class the agent makes up, and ending the child early
ends it without success. The child has limits of its own: a solution that never ends or eats all memory is wrong, and
that is not a failure of the verifier.

Exit code 0: every check passed. 1: one did not. 3: the checks themselves could not be read.
"""

from __future__ import annotations

import ast
import contextlib
import os
import resource
import subprocess
import sys
import threading
from typing import Any

SOLUTION = "solution.py"
CPU_S = 20
"""Of the child, for all checks together; time that others take on a busy machine does not count."""
WALL_S = 75.0
"""For one that sleeps."""
MEMORY_BYTES = 384 << 20
FILE_BYTES = 1 << 20
ANSWER_CHARS = 1 << 20
PASSED, FAILED, UNREADABLE = 0, 1, 3


class WrongAnswer(Exception):
    """The agent's function raised, ended its process, or answered with what is no plain value."""


def main(checks: str, name: str, workdir: str) -> int:
    names: dict[str, Any] = {"__name__": "checks"}
    try:
        with open(checks, encoding="utf-8") as source:
            exec(compile(source.read(), checks, "exec"), names)
        check = names["check"]
    except Exception as error:
        print(f"the checks cannot be read: {error!r}")
        return UNREADABLE
    child = subprocess.Popen(
        [sys.executable, "-I", "-B", __file__, name, workdir],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        cwd=workdir,
    )
    too_long = threading.Timer(WALL_S, child.kill)
    too_long.daemon = True
    too_long.start()
    try:
        names[name] = candidate = _asking(child)
        check(candidate)
    except BaseException as error:
        print(f"check failed: {type(error).__name__}: {str(error)[:500]}")
        return FAILED
    finally:
        too_long.cancel()
        child.kill()
        child.wait()
    return PASSED


def _asking(child: subprocess.Popen[str]) -> Any:
    """The agent's function, as the checks call it."""
    assert child.stdin is not None and child.stdout is not None
    to_child, from_child = child.stdin, child.stdout

    def candidate(*arguments: object) -> object:
        try:
            to_child.write(plain(arguments) + "\n")
            to_child.flush()
            kind, _, said = from_child.readline(ANSWER_CHARS).partition(" ")
        except (OSError, ValueError) as error:
            raise WrongAnswer(f"its process has ended: {error}") from None
        if kind != "value" or not said.endswith("\n"):
            raise WrongAnswer(said.strip()[:200] or "its process ended without an answer")
        try:
            return ast.literal_eval(said)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise WrongAnswer(f"it answered with no plain value: {error}") from None

    return candidate


def plain(value: object) -> str:
    """Python source of numbers, texts, None and containers of them, so that `literal_eval` gives an equal value. Raises TypeError."""
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, float):
        return "1e999" if value == float("inf") else "-1e999" if value == float("-inf") else float.__repr__(value)
    for kind in (int, complex, str, bytes):
        if isinstance(value, kind):
            return kind.__repr__(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{plain(key)}: {plain(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(plain, value)) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(f"{plain(item)}, " for item in value) + ")"
    if isinstance(value, set):
        return "{" + ", ".join(map(plain, value)) + "}" if value else "set()"
    raise TypeError(f"a value of type {type(value).__name__} is not compared: answer with plain values")


def answer_calls(name: str, workdir: str) -> None:
    """The child: loads the agent's file and answers one call per line."""
    calls, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", encoding="utf-8")
    for number in (0, 1):  # what the agent's code reads is empty, what it prints is thrown away
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    for limit, amount in (
        (resource.RLIMIT_CPU, CPU_S),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),  # no process of its own could outlive it and write a verdict
    ):
        with contextlib.suppress(ValueError, OSError):  # a lower one is set already, or this system has none
            resource.setrlimit(limit, (amount, amount))
    sys.path.insert(0, workdir)
    names: dict[str, Any] = {"__name__": "solution", "__file__": SOLUTION}
    failure = ""
    try:
        with open(SOLUTION, encoding="utf-8") as source:
            exec(compile(source.read(), SOLUTION, "exec"), names)
        function = names[name]
    except BaseException as error:
        failure = repr(error)
    for call in calls:
        try:
            said = f"error {failure}" if failure else f"value {plain(function(*ast.literal_eval(call)))}"
        except BaseException as error:
            said = f"error {error!r}"
        answers.write(said.replace("\n", " ") + "\n")
        answers.flush()


if __name__ == "__main__":
    if len(sys.argv) == 4:
        sys.exit(main(*sys.argv[1:]))
    answer_calls(*sys.argv[1:])
