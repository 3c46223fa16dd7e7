"""The same attacks without a sandbox: each comes through, or its being held elsewhere would say nothing."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.attacks.known import LIMITS, MAX_NAMES, PRELUDE, Attack
from tests.attacks.stage import Stage

PYTHON = "/usr/bin/python3"
_PREFIXES = {
    "outside": (),
    "own mounts": ("unshare", "--mount", "--uts"),
    "another user": ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
}
_RUN_S = 60.0

# A parent for the attack to attack, in a session of keys of its own.
_WRAPPER = (
    PRELUDE
    + """
keyctl(1, None)
add_key(aim["key"].encode(), aim["word"].encode())
for _ in range(aim["times"]):
    subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[1]])
"""
)


def comes_through(attack: Attack, stage: Stage) -> bool:
    """Run it outside. The stage's folder `control` is where it works."""
    if attack.name in OWN_JUDGES:
        return OWN_JUDGES[attack.name](attack, stage)
    said = run_wrapped(attack, stage, _PREFIXES[attack.control]).stdout
    return "ESCAPED" in said or bool(stage.harm())


def run_wrapped(attack: Attack, stage: Stage, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """As the child of a process that it may attack; whatever it starts is killed afterwards."""
    aim = json.dumps({**stage.aim, "names": MAX_NAMES, "times": 2 if attack.twice else 1})
    argv = [*prefix, PYTHON, "-c", _WRAPPER, aim, PRELUDE + attack.script]
    with subprocess.Popen(
        argv,
        cwd=_folder(stage),
        env={"EVERLONG_WORD": stage.word, "PATH": os.environ["PATH"]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=_RUN_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(argv, process.returncode, said)


def start_alone(attack: Attack, stage: Stage, **how: object) -> subprocess.Popen[bytes]:
    aim = json.dumps({**stage.aim, "names": MAX_NAMES})
    argv = [PYTHON, "-c", PRELUDE + attack.script, aim]
    return subprocess.Popen(argv, cwd=_folder(stage), start_new_session=True, **how)  # ty: ignore[no-matching-overload]


def _folder(stage: Stage) -> Path:
    return Path(str(stage.aim["workdir"]))


def _kills_its_parent(attack: Attack, stage: Stage) -> bool:
    return run_wrapped(attack, stage).returncode == -signal.SIGTERM


def _goes_on_writing(attack: Attack, stage: Stage) -> bool:
    with start_alone(attack, stage) as process:
        process.wait(_RUN_S)
        verdict = _folder(stage) / "verdict"
        try:
            verdict.write_text("0")
            for _ in range(500):
                if verdict.read_text() == "1":
                    return True
                select.select([], [], [], 0.02)
            return False
        finally:
            _kill_below(_folder(stage))


def _outlives(attack: Attack, stage: Stage) -> bool:
    with start_alone(attack, stage) as process:
        process.wait(_RUN_S)
        return bool(_end(stage))


def _ignores_its_end(attack: Attack, stage: Stage) -> bool:
    with start_alone(attack, stage) as process:
        for _ in range(500):
            if stage.running():
                break
            select.select([], [], [], 0.02)
        process.terminate()
        try:
            process.wait(0.3)
        except subprocess.TimeoutExpired:
            return True
        finally:
            _end(stage)
        return False


def _takes_all_watches(attack: Attack, stage: Stage) -> bool:
    """In a user namespace with few of them, so that the tests leave the machine's alone."""
    script = """
if libc.unshare(0x10000000): sys.exit("no user namespace")
open("/proc/sys/user/max_inotify_instances", "w").write("10")
child = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print("ESCAPED" if libc.inotify_init1(0) < 0 else "one left")
child.kill()
"""
    argv = [PYTHON, "-c", PRELUDE + script, json.dumps(stage.aim), PRELUDE + attack.script]
    done = subprocess.run(argv, cwd=_folder(stage), capture_output=True, text=True, timeout=_RUN_S)
    return "ESCAPED" in done.stdout


def _says_too_much(attack: Attack, stage: Stage) -> bool:
    with start_alone(attack, stage, stdout=subprocess.PIPE) as process:
        return len(process.communicate(timeout=_RUN_S)[0]) > LIMITS.output_bytes


def _blocks_its_reader(attack: Attack, stage: Stage) -> bool:
    with start_alone(attack, stage) as process:
        process.wait(_RUN_S)
    try:
        subprocess.run(["cat", _folder(stage) / "answer"], timeout=0.3)
    except subprocess.TimeoutExpired:
        return True
    return False


def _cannot_be_removed(attack: Attack, stage: Stage) -> bool:
    with start_alone(attack, stage) as process:
        process.wait(_RUN_S)
    try:
        shutil.rmtree(_folder(stage))
    except (OSError, RecursionError):
        return True
    return False


def _finds_an_open_file(attack: Attack, stage: Stage) -> bool:
    with (
        open(stage.secret) as file,
        start_alone(attack, stage, stdout=subprocess.PIPE, pass_fds=(file.fileno(),)) as one,
    ):
        return b"ESCAPED" in one.communicate(timeout=_RUN_S)[0]


def _answers_in_its_place(attack: Attack, stage: Stage) -> bool:
    reader, writer = os.pipe()
    with start_alone(attack, stage, stdout=subprocess.DEVNULL, pass_fds=(writer,)) as process:
        os.close(writer)
        process.wait(_RUN_S)
    with open(reader, "rb") as answer:
        return answer.read().startswith(b"done 0 ")


OWN_JUDGES: dict[str, Callable[[Attack, Stage], bool]] = {
    "signal-supervisor": _kills_its_parent,
    "background-writer": _goes_on_writing,
    "outlive": _outlives,
    "never-end": _ignores_its_end,
    "watches": _takes_all_watches,
    "output-bomb": _says_too_much,
    "blocking-pipe": _blocks_its_reader,
    "tree-that-stays": _cannot_be_removed,
    "inherited-files": _finds_an_open_file,
    "forged-answer": _answers_in_its_place,
}


def _end(stage: Stage) -> list[int]:
    """Kill what carries the stage's mark, and say what it was."""
    marked = stage.running()
    for pid in marked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return marked


def _kill_below(folder: Path) -> None:
    """Processes that left the group and the session of their parent: by the folder that they work in."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{name}/cwd") == str(folder):
                os.kill(int(name), signal.SIGKILL)
