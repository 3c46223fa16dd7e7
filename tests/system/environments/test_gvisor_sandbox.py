"""What only gVisor's sandboxes can do: processes in snapshots, images beside earlier ones, pools, and nothing left behind."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from everlong.contracts.errors import SandboxError, WorkspaceTooLarge
from everlong.contracts.ports import Command, Mount, SandboxSpec
from everlong.contracts.records import Limits
from everlong.environments.sandboxes.gvisor import GvisorBackend
from everlong.environments.sandboxes.pool import PooledBackend

SOURCE = Path(__file__).parents[3] / "src"
COUNTING = "(n=0; while :; do echo $((++n)) > /tmp/count; sleep 0.02; done) > /dev/null 2>&1 &"

MANAGER = """
import asyncio, sys
from pathlib import Path
from everlong.contracts.ports import Command, SandboxSpec
from everlong.environments.sandboxes.gvisor import GvisorBackend

async def main():
    backend = GvisorBackend(Path(sys.argv[1]))
    sandbox = await backend.create(SandboxSpec(name="victim"))
    paused = await backend.create(SandboxSpec(name="paused"))
    await paused.pause("disk")
    running = asyncio.create_task(sandbox.exec(Command(argv=("sh", "-c", "echo > started; sleep 300"), timeout_s=300)))
    while not running.done():
        try:
            await sandbox.read("started")
            break
        except FileNotFoundError:
            await asyncio.sleep(0.05)
    print("started", flush=True)
    await running

asyncio.run(main())
"""


@pytest.fixture
async def backend(tmp_path):
    try:
        made = GvisorBackend(tmp_path / "sandboxes")
        await made.probe()
    except SandboxError as error:
        pytest.skip(f"no gVisor on this machine: {error}")
    yield made
    await made.close()


async def sh(sandbox, script, **command):
    return await sandbox.exec(Command(argv=("bash", "-c", script), timeout_s=30.0, **command))


async def count(sandbox):
    """Between its opening and its writing the file is empty."""
    return int((await sh(sandbox, 'until [ "$n" ]; do n=$(cat /tmp/count); done; echo $n')).output)


async def counts_on(sandbox):
    first = await count(sandbox)
    for _ in range(50):
        if await count(sandbox) > first:
            return True
    return False


def holding(folder):
    """Processes of this machine that were started with something below the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str(folder).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return [pid for pid in found if pid != os.getpid()]


async def test_clones_go_on_with_their_processes_and_share_neither_randomness_nor_an_old_clock(backend):
    sandbox = await backend.create(SandboxSpec(name="origin"))
    await sh(sandbox, COUNTING, keep_processes=True)
    assert await counts_on(sandbox)
    snapshot = await sandbox.snapshot()
    await asyncio.sleep(1.0)
    clones = await backend.restore(snapshot, ("clone-a", "clone-b"))
    seen = set()
    for one in clones:
        assert await counts_on(one)
        before = time.time()
        script = "import time, uuid; print(uuid.uuid4(), time.time())"
        identity, clock = (await one.exec(Command(argv=("python3", "-c", script), timeout_s=30))).output.split()
        assert before - 0.5 <= float(clock) <= time.time() + 0.5
        seen.add(identity)
    assert len(seen) == 2
    assert await counts_on(sandbox)


async def test_what_a_command_leaves_is_dead_unless_it_is_to_be_kept(backend):
    sandbox = await backend.create(SandboxSpec(name="a"))
    result = await sh(sandbox, "setsid sleep 4711 & sleep 4711 & echo said")
    assert (result.exit_code, result.output) == (0, b"said\n")
    assert (await sh(sandbox, "ps ax | grep -c '[s]leep 4711'", keep_processes=True)).output == b"0\n"
    timed_out = await sandbox.exec(
        Command(argv=("bash", "-c", "sleep 4712 & echo said; sleep 60"), timeout_s=1.0, keep_processes=True)
    )
    assert (timed_out.exit_code, timed_out.timed_out, timed_out.output) == (124, True, b"said\n")
    assert (await sh(sandbox, "ps ax | grep -c '[s]leep 4712'", keep_processes=True)).output == b"0\n"


async def test_paused_to_disk_it_has_no_process_and_comes_back_whole(backend):
    sandbox = await backend.create(SandboxSpec(name="a"))
    await sh(sandbox, f"echo here > note; {COUNTING}", keep_processes=True)
    bundle = f"{backend.claim.folder}/s-a/bundle"
    assert holding(bundle)
    await sandbox.pause("disk")
    assert not holding(bundle)
    for _ in range(2):
        await sandbox.resume()
        assert await sandbox.read("note") == b"here\n"
        assert await counts_on(sandbox)
        await sandbox.pause("disk")


async def test_a_second_snapshot_stores_what_changed_and_outlives_its_parent(backend):
    sandbox = await backend.create(SandboxSpec(name="a"))
    await sh(sandbox, "head -c 40000000 /dev/urandom > large; sha256sum large > sum")
    first = await sandbox.snapshot()
    await sh(sandbox, "echo more > small")
    second = await sandbox.snapshot(first)
    third = await sandbox.snapshot(second)
    assert first.stored_bytes > 40_000_000
    assert second.stored_bytes < 5_000_000
    assert third.stored_bytes < 5_000_000
    await backend.drop(first)
    await backend.drop(second)
    (clone,) = await backend.restore(third, ("clone",))
    assert (await sh(clone, "sha256sum -c sum && cat small")).output == b"large: OK\nmore\n"
    await sandbox.rollback(third)
    assert (await sh(sandbox, "sha256sum -c sum")).exit_code == 0
    await backend.drop(third)
    assert not list(backend.claim.folder.glob("images/*"))


async def test_limits_hold_and_the_host_is_not_there(backend, tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "t").write_text("given")
    (tmp_path / "secret").write_text("secret")
    limits = Limits(memory_mb=200, processes=20, output_bytes=1000)
    mounts = (Mount(source=str(tmp_path / "tests"), target="/tests"),)
    sandbox = await backend.create(SandboxSpec(name="a", limits=limits, mounts=mounts))
    hog = await sandbox.exec(
        Command(argv=("python3", "-c", "x = []\nwhile True: x.append(bytes(1 << 20))"), timeout_s=60)
    )
    assert (hog.exit_code, hog.memory_exceeded) == (137, True)
    forks = await sh(sandbox, "for i in $(seq 100); do sleep 60 & done; wait")
    assert (forks.exit_code, b"process limit of 20 exceeded" in forks.output) == (137, True)
    disk = await sh(sandbox, "for i in $(seq 400); do head -c 1000000 /dev/zero > f$i || exit 1; done; sleep 2")
    assert disk.exit_code != 0
    await sh(sandbox, "rm -f f*")
    assert (await sh(sandbox, "yes | head -c 100000")).truncated
    for attempt in (
        f"cat {tmp_path}/secret",
        "ls /root /home",
        "echo x > /usr/bin/trojan",
        "echo x >> /etc/passwd",
        "echo x > /tests/t",
        "echo x > /.everlong/x",
        "ls /run/everlong",
        "kill -9 1",
        "mount -t tmpfs x /mnt",
        "unshare -r true",
        "mknod disk b 8 0 && head -c 1 disk",
        "timeout 5 bash -c 'echo > /dev/tcp/1.1.1.1/80'",
    ):
        assert (await sh(sandbox, attempt)).exit_code != 0, attempt
    assert (await sh(sandbox, "cat /tests/t; id -u; nproc > /dev/null")).output == b"given1000\n"
    with pytest.raises(SandboxError, match="gVisor sandboxes have none"):
        await backend.create(SandboxSpec(name="b", network=True))


@pytest.mark.parametrize(
    ("left", "why"),
    [
        ("python3 -c 'for n in range(700): open(str(n), \"w\").close()'", "500 names"),
        ("head -c 12000000 /dev/urandom > a; cp a b; cp a c", "30 MB"),
        ('python3 -c \'import os\nfor _ in range(20): os.mkdir("d" * 250); os.chdir("d" * 250)\'', "4000 bytes"),
    ],
    ids=["names", "bytes", "depth"],
)
async def test_what_cannot_be_copied_is_the_agents_doing(backend, monkeypatch, left, why):
    monkeypatch.setattr("everlong.environments.sandboxes.layout.MAX_ENTRIES", 500)
    sandbox = await backend.create(SandboxSpec(name="a", limits=Limits(memory_mb=200, disk_mb=30)))
    await sh(sandbox, left)
    with pytest.raises(WorkspaceTooLarge, match=why):
        await sandbox.fork(SandboxSpec(name="b"))
    await sh(sandbox, "rm -rf *; echo kept > file")
    assert await (await sandbox.fork(SandboxSpec(name="b"))).read("file") == b"kept\n"


async def test_more_sandboxes_live_than_may_hold_memory(backend):
    pool = PooledBackend(backend, pause_after_s=None, max_resident=2)
    sandboxes = [await pool.create(SandboxSpec(name=f"s{n}")) for n in range(4)]
    for sandbox in sandboxes:
        await sandbox.write("name", sandbox.name.encode())
    said = await asyncio.gather(*(sh(sandbox, "cat name") for sandbox in sandboxes))
    assert [one.output for one in said] == [b"s0", b"s1", b"s2", b"s3"]
    fork = await sandboxes[0].fork(SandboxSpec(name="grade"))
    assert await fork.read("name") == b"s0"
    assert pool.counts.max_resident == 2
    for sandbox in (*sandboxes, fork):
        await sandbox.close()


@pytest.mark.parametrize("times", range(2))
def test_kill_9_of_the_manager_leaves_no_process_and_the_next_one_no_file(tmp_path, times):
    root = tmp_path / "sandboxes"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE)}
    argv = [sys.executable, "-c", MANAGER, str(root)]
    manager = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if manager.stdout.readline() != "started\n":
        trouble = manager.stderr.read()
        assert "SandboxError" in trouble, trouble
        pytest.skip(f"no gVisor on this machine: {trouble[-300:]}")
    assert holding(root)
    manager.kill()
    manager.communicate()
    for _ in range(1000):
        if not holding(root):
            break
        time.sleep(0.01)
    assert not holding(root)

    async def next_one():
        backend = GvisorBackend(root)
        assert len(backend.swept) == 1
        await backend.close()

    asyncio.run(next_one())
    assert not list(root.iterdir())
