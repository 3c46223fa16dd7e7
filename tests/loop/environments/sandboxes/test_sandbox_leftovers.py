"""A manager that is killed leaves nothing behind; an ordinary user gets the same sandboxes; a machine that refuses says so."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from everlong.contracts.errors import SandboxError
from everlong.contracts.ports import Command, SandboxSpec
from everlong.environments.sandboxes.local import LocalBackend
from everlong.environments.sandboxes.registry import MARKER, Claim, kill_marked, scratch_folder, sweep
from everlong.environments.sandboxes.trees import remove_tree
from everlong.environments.tasks.terminal.generate import make_terminal

SOURCE = Path(__file__).parents[4] / "src"

MANAGER = """
import asyncio, sys
from pathlib import Path
from everlong.contracts.ports import Command, SandboxSpec
from everlong.environments.sandboxes.local import LocalBackend

async def main():
    backend = LocalBackend(Path(sys.argv[1]), isolation=sys.argv[2], warn=print)
    sandbox = await backend.create(SandboxSpec(name="victim"))
    idle = await backend.create(SandboxSpec(name="idle"))
    script = "echo > started; setsid sleep 9753.25 & sleep 9753.25"
    running = asyncio.create_task(sandbox.exec(Command(argv=("bash", "-c", script), timeout_s=300)))
    while not running.done():
        try:
            await sandbox.read("started")
            break
        except FileNotFoundError:
            await asyncio.sleep(0.01)
    print("started", flush=True)
    await running

asyncio.run(main())
"""

# Everything is imported before the user changes: an ordinary user may not be able to read where our modules lie.
ORDINARY = """
import asyncio, concurrent.futures.thread, os, sys
from pathlib import Path
from everlong.contracts.ports import Command, SandboxSpec
from everlong.environments.sandboxes.local import LocalBackend

async def main():
    said = []
    backend = LocalBackend(Path(sys.argv[1]), isolation=sys.argv[2], warn=said.append)
    capabilities = await backend.probe()
    sandbox = await backend.create(SandboxSpec(name="a"))
    run = lambda script: sandbox.exec(Command(argv=("bash", "-c", script), timeout_s=20))
    first = await run("echo hi > f; id -u; sleep 300 & echo done")
    copy = await sandbox.fork(SandboxSpec(name="b"))
    print(capabilities.isolation, len(said), first.exit_code, first.output, await copy.read("f"))
    if capabilities.isolation == "namespaces":
        hog = await run("for i in $(seq 400); do sleep 15 & done 2>&1 | head -1; true")
        print(b"fork: " in hog.output)
    await run("mkdir locked; echo > locked/f; chmod 0 locked")
    await backend.close()
    print(sum(1 for _ in Path(sys.argv[1]).iterdir()), "left")

BEFORE
asyncio.run(main())
"""
BECOME_NOBODY = "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)"


def python(script, *arguments, **keywords):
    # numpy starts a thread per core, and a process with several threads may not enter a user namespace
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = {**os.environ, **threads, "PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        **keywords,
    )


def running(word):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if word.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


async def appears(word):
    for _ in range(1000):
        if running(word):
            return True
        await asyncio.sleep(0.01)
    return False


async def gone(word):
    for _ in range(1000):
        if not running(word):
            return True
        await asyncio.sleep(0.01)
    return False


def needs_namespaces(tmp_path, isolation):
    if isolation != "namespaces":
        return

    async def probe():
        backend = LocalBackend(tmp_path / "probe", isolation=isolation)
        try:
            await backend.probe()
        finally:
            await backend.close()

    try:
        asyncio.run(probe())
    except SandboxError as error:
        pytest.skip(f"this machine refuses namespaces: {error}")


STAGING = """
import asyncio, sys, time
from pathlib import Path
from everlong.environments.sandboxes.local import LocalBackend
from everlong.environments.tasks import opening
from everlong.environments.tasks.harbor import read_task

def hang(task, staged):
    (staged / "half").write_text("x")
    print(staged, flush=True)
    time.sleep(9753.25)

opening._stage = hang
asyncio.run(opening.open_task(read_task(Path(sys.argv[2])), LocalBackend(Path(sys.argv[1])), "e"))
"""
SCRATCH = """
import sys, time
from pathlib import Path
from everlong.environments.sandboxes.registry import scratch_folder
with scratch_folder("probe", Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    time.sleep(9753.25)
"""


def test_what_was_put_together_for_a_sandbox_when_its_manager_was_killed_goes_with_the_next_one(tmp_path):
    (task,) = make_terminal(tmp_path / "task", 1)
    (task / "environment" / "Dockerfile").write_text("FROM a\nWORKDIR /app\nRUN mkdir out\n")
    root = tmp_path / "sandboxes"
    with python(STAGING, root, task) as manager:
        staged = Path(manager.stdout.readline().strip())
        manager.send_signal(signal.SIGKILL)
    assert (staged / "half").exists() and staged.is_relative_to(root)
    successor = LocalBackend(root)
    assert not staged.exists()
    asyncio.run(successor.close())


def test_a_killed_commands_scratch_folder_goes_when_the_next_one_opens_its_own(tmp_path):
    with scratch_folder("probe", tmp_path) as living, python(SCRATCH, tmp_path) as killed:
        left = Path(killed.stdout.readline().strip())
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "lock").touch()
        (tmp_path / "everlong-probe-trap").symlink_to(outside)
        assert left.is_dir()
        with scratch_folder("probe", tmp_path) as fresh:
            assert not left.exists() and living.is_dir() and fresh.is_dir()
        assert (outside / "lock").exists(), "no link is followed"
    assert not living.exists() and not fresh.exists()


@pytest.mark.parametrize("isolation", ["namespaces", "none"])
def test_a_killed_manager_leaves_no_process_and_the_next_one_removes_its_files(tmp_path, isolation):
    needs_namespaces(tmp_path, isolation)
    root = tmp_path / "sandboxes"
    bystander = Claim(root)
    (bystander.folder / "kept").write_text("x")
    with python(MANAGER, root, isolation) as manager:
        assert manager.stdout.readline() == "started\n"
        assert len(running("9753.25")) >= 2
        manager.send_signal(signal.SIGKILL)
    assert asyncio.run(gone("9753.25")), "its commands die with it"
    [dead] = [folder for folder in root.iterdir() if folder != bystander.folder]
    groups = (dead / "memory_groups").read_text().split() if (dead / "memory_groups").exists() else []
    assert (dead / "s-victim").is_dir() and (dead / "s-idle").is_dir()

    successor = LocalBackend(root, isolation=isolation)
    assert successor.swept == [dead]
    assert sorted(root.iterdir()) == sorted([bystander.folder, successor.claim.folder])
    assert (bystander.folder / "kept").exists(), "its owner lives"
    assert not any(Path(group).exists() for group in groups)
    asyncio.run(successor.close())
    bystander.release()
    assert list(root.iterdir()) == []


def test_a_killed_launcher_is_a_sandbox_error_and_nothing_is_left(tmp_path):
    async def main(isolation):
        backend = LocalBackend(tmp_path / isolation, isolation=isolation)
        sandbox = await backend.create(SandboxSpec(name="a"))
        script = "echo > started; sleep 9753.5"
        task = asyncio.create_task(sandbox.exec(Command(argv=("bash", "-c", script), timeout_s=300)))
        assert await appears("9753.5")
        os.kill(sandbox._launch._process.pid, signal.SIGKILL)
        if isolation == "none":
            # Without namespaces nothing holds the orphans but their mark, which closing looks for.
            kill_marked(f"{sandbox._home}/")
        with pytest.raises(SandboxError, match="ended without an answer"):
            await task
        assert await gone("9753.5")
        await backend.close()

    needs_namespaces(tmp_path, "namespaces")
    asyncio.run(main("namespaces"))
    asyncio.run(main("none"))


def test_marked_processes_of_a_dead_manager_are_killed_and_others_are_not(tmp_path):
    claim = Claim(tmp_path)
    dead = tmp_path / "run-dead"
    dead.mkdir()
    (dead / "lock").touch()
    marks = {"dead": f"{dead}/s-a/", "living": f"{claim.folder}/s-a/", "longer": f"{dead}er/s-a/"}
    sleepers = {
        name: subprocess.Popen(["sleep", "300"], env={MARKER: mark, "PATH": os.environ["PATH"]})
        for name, mark in marks.items()
    }
    try:
        assert sweep(tmp_path) == [dead]
        assert sleepers["dead"].wait(10) == -signal.SIGKILL
        assert sleepers["living"].poll() is None and sleepers["longer"].poll() is None
    finally:
        for sleeper in sleepers.values():
            sleeper.kill()
            sleeper.wait()
        claim.release()


def test_a_folder_that_was_made_and_not_yet_locked_goes_and_one_that_holds_something_stays(tmp_path):
    (tmp_path / "run-abcdefgh").mkdir()
    (tmp_path / "run-mine").mkdir()
    (tmp_path / "run-mine" / "thesis").touch()
    assert sweep(tmp_path) == [tmp_path / "run-abcdefgh"]
    assert [path.name for path in tmp_path.iterdir()] == ["run-mine"]


def test_who_is_killed_while_it_removes_leaves_the_rest_to_the_next_one(tmp_path, monkeypatch):
    dead = tmp_path / "run-dead"
    for name in ("a", "b"):
        (dead / name).mkdir(parents=True)
    (dead / "lock").touch()

    def die(path):
        if path.name == "b":
            raise KeyboardInterrupt
        remove_tree(path)

    monkeypatch.setattr("everlong.environments.sandboxes.registry.remove_tree", die)
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path)
    monkeypatch.undo()
    assert (dead / "lock").exists() and (dead / "b").exists()
    assert sweep(tmp_path) == [dead]
    assert list(tmp_path.iterdir()) == []


HOLDER = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_EX)
os.pwrite(lock, sys.argv[2].encode(), 0)
print("locked", flush=True)
sys.stdin.readline()
"""


def test_a_lock_that_outlives_its_owner_for_a_moment_is_waited_for_and_a_living_owners_is_not(tmp_path):
    """A child that was just forked holds it until its program begins."""
    folders = {name: tmp_path / f"run-{name}" for name in ("orphaned", "living")}
    holders = {}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "lock").touch()
        owner = "4194305 1" if name == "orphaned" else ""
        holders[name] = python(HOLDER, folder / "lock", owner, stdin=subprocess.PIPE)
        assert holders[name].stdout.readline() == "locked\n"
    timer = threading.Timer(0.3, holders["orphaned"].kill)
    timer.start()
    assert sweep(tmp_path) == [folders["orphaned"]]
    assert folders["living"].exists()
    for holder in holders.values():
        holder.kill()
        holder.communicate()


def test_a_group_is_removed_with_what_is_in_it(tmp_path):
    claim = Claim(tmp_path)
    parent = claim.usable_groups()
    if parent is None:
        pytest.skip("no memory groups can be made here")
    group = parent / f"everlong-{claim.folder.name}-test"
    claim.make_group(group, 64 << 20)
    member = subprocess.Popen(["sleep", "300"])
    (group / "cgroup.procs").write_text(str(member.pid))
    claim.release()
    assert member.wait(60) == -signal.SIGKILL
    assert not group.exists() and list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("isolation", ["namespaces", "none"])
def test_an_ordinary_user_gets_the_same(tmp_path, isolation):
    needs_namespaces(tmp_path, isolation)
    # Not below the test's own folder, which other users may not enter.
    root = Path(f"/var/tmp/everlong-test-{os.getpid()}-{isolation}")
    root.mkdir(mode=0o777)
    os.chown(root, 65534, 65534)
    try:
        with python(ORDINARY.replace("BEFORE", BECOME_NOBODY), root, isolation) as user:
            lines = user.stdout.read().splitlines()
        inner = "1000" if isolation == "namespaces" else "65534"
        assert lines[0].startswith(isolation)
        assert lines[0].endswith(rf"0 0 b'{inner}\ndone\n' b'hi\n'")
        assert lines[1:] == (["True"] if isolation == "namespaces" else []) + ["0 left"]
    finally:
        subprocess.run(["rm", "-rf", str(root)], check=True)


REFUSE = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
uid, gid = os.getuid(), os.getgid()
assert libc.unshare(0x10000000) == 0, os.strerror(ctypes.get_errno())
open("/proc/self/setgroups", "w").write("deny")
open("/proc/self/uid_map", "w").write(f"0 {uid} 1")
open("/proc/self/gid_map", "w").write(f"0 {gid} 1")
open("/proc/sys/user/max_user_namespaces", "w").write("0")
"""


def test_a_machine_that_refuses_namespaces_is_used_without_and_says_so_once(tmp_path):
    needs_namespaces(tmp_path, "namespaces")
    with python(ORDINARY.replace("BEFORE", REFUSE), tmp_path / "s", "auto") as user:
        lines = user.stdout.read().splitlines()
    assert lines[0].startswith("none 1 0 ")
    assert lines[-1] == "0 left"


def test_namespaces_that_were_insisted_on_are_not_replaced_by_less(tmp_path):
    needs_namespaces(tmp_path, "namespaces")
    with python(ORDINARY.replace("BEFORE", REFUSE), tmp_path / "s", "namespaces", stderr=subprocess.PIPE) as user:
        _, trouble = user.communicate()
    assert user.returncode == 1
    assert "no sandbox can run here with isolation 'namespaces'" in trouble
    assert "inner user namespace: No space left on device" in trouble
