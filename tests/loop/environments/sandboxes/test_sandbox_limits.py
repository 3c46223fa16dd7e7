"""What a command cannot do: outstay its time, fill memory, disk, output or the process table. Each takes about a second."""

import asyncio
from pathlib import Path

import pytest

from everlong.contracts.errors import SandboxError, WorkspaceTooLarge
from everlong.contracts.ports import Command, SandboxSpec
from everlong.contracts.records import Limits
from everlong.environments.sandboxes.local import LocalBackend

LIMITS = Limits(memory_mb=64, disk_mb=20, processes=40, output_bytes=1 << 16)


@pytest.fixture(params=["namespaces", "none", "sampled"])
async def backend(request, tmp_path, monkeypatch):
    """sampled: namespaces, with memory sampled although a control group may be to be had."""
    if request.param == "sampled":
        monkeypatch.setattr("everlong.environments.sandboxes.registry.Claim.usable_groups", lambda claim: None)
    made = LocalBackend(tmp_path / "s", isolation="none" if request.param == "none" else "namespaces")
    try:
        await made.probe()
    except SandboxError as error:
        await made.close()
        pytest.skip(f"this machine refuses namespaces: {error}")
    yield made
    await made.close()


async def sh(sandbox, script, timeout_s=60.0):
    return await sandbox.exec(Command(argv=("bash", "-c", script), timeout_s=timeout_s))


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


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("sleep 8642.5", id="plain"),
        pytest.param("setsid sleep 8642.5 & sleep 8642.5", id="own-session"),
        pytest.param("trap '' TERM INT HUP; (trap '' TERM; sleep 8642.5)", id="ignores-signals"),
        pytest.param("sleep 8642.5 | cat", id="pipe"),
        pytest.param("(sleep 8642.5 & sleep 8642.5 & wait) & wait", id="grandchildren"),
        pytest.param("kill -STOP $$", id="stopped"),
    ],
)
async def test_the_time_limit_kills_everything_and_keeps_what_was_said(backend, script):
    sandbox = await backend.create(SandboxSpec(name="a", limits=LIMITS))
    result = await sh(sandbox, f"echo early; {script}", timeout_s=0.5)
    assert (result.exit_code, result.output, result.timed_out) == (124, b"early\n", True)
    assert 0.5 <= result.elapsed_s < 8642
    assert running("8642.5") == []


async def test_a_command_cut_by_timeout_keeps_its_code_only_without_a_pipe(backend):
    sandbox = await backend.create(SandboxSpec(name="a", limits=LIMITS))
    assert (await sh(sandbox, "timeout 0.2 sleep 5")).exit_code == 124
    assert (await sh(sandbox, "timeout 0.2 sleep 5 | tee log")).exit_code == 0
    assert (await sh(sandbox, "set -o pipefail; timeout 0.2 sleep 5 | tee log")).exit_code == 124


async def test_endless_output_is_read_on_and_thrown_away(backend):
    sandbox = await backend.create(SandboxSpec(name="a", limits=LIMITS))
    result = await sh(sandbox, "timeout 1 yes; echo $? > code")
    assert (len(result.output), result.truncated, result.exit_code) == (1 << 16, True, 0)
    assert await sandbox.read("code") == b"124\n", "the writer was never blocked"


async def test_more_memory_than_allowed_is_killed_and_said(backend):
    sandbox = await backend.create(SandboxSpec(name="a", limits=LIMITS))
    result = await sh(sandbox, "exec python3 -c 'import time; b = bytearray(200 << 20); time.sleep(30)'")
    assert (result.exit_code, result.memory_exceeded, result.timed_out) == (137, True, False)
    small = await sh(sandbox, "exec python3 -c 'import time; b = bytearray(20 << 20); time.sleep(0.3)'")
    assert (small.exit_code, small.memory_exceeded) == (0, False)


SHARED = """
import os, time
block = bytearray(os.urandom(1)) * (30 << 20)
for _ in range(4):
    if os.fork() == 0:
        time.sleep(0.5); os._exit(0)
for _ in range(4): os.wait()
print("shared")
"""


async def test_memory_that_processes_share_counts_once(backend):
    sandbox = await backend.create(SandboxSpec(name="a", limits=LIMITS))
    await sandbox.write("shared.py", SHARED.encode())
    result = await sh(sandbox, "python3 shared.py")
    assert (result.output, result.memory_exceeded) == (b"shared\n", False)


async def test_many_processes_together_exceed_the_memory_of_none(backend):
    sandbox = await backend.create(SandboxSpec(name="a", limits=LIMITS))
    one = "python3 -c 'import time; b = bytearray(25 << 20); time.sleep(30)'"
    result = await sh(sandbox, f"{one} & {one} & {one} & wait")
    assert (result.exit_code, result.memory_exceeded, result.timed_out) == (137, True, False)


async def test_a_fork_bomb_stays_within_the_process_limit(backend):
    sandbox = await backend.create(SandboxSpec(name="a", limits=LIMITS))
    await sh(sandbox, "for i in $(seq 200); do sleep 8642.75 & done 2>/dev/null; wait", timeout_s=1.0)
    result = await sh(sandbox, "for i in $(seq 200); do sleep 0.5 & done 2>&1 | head -1; exit 0", timeout_s=20.0)
    caged = (await backend.probe()).isolation == "namespaces"
    assert (b"fork: " if caged else b"process limit of 40 exceeded") in result.output
    assert running("8642.75") == []
    assert (await sh(sandbox, "echo fine")).output == b"fine\n"


async def test_the_process_limit_of_one_sandbox_is_not_anothers(backend):
    first = await backend.create(SandboxSpec(name="a", limits=LIMITS))
    second = await backend.create(SandboxSpec(name="b", limits=LIMITS))
    script = "for i in $(seq 30); do sleep 0.5 & done; wait; echo all"
    results = await asyncio.gather(sh(first, script), sh(second, script))
    assert [result.output for result in results] == [b"all\n", b"all\n"]


async def test_one_file_cannot_outgrow_the_disk_limit(backend):
    sandbox = await backend.create(SandboxSpec(name="a", limits=LIMITS))
    result = await sh(sandbox, "exec head -c 30M /dev/zero > big")
    assert result.exit_code == 128 + 25
    assert (await sh(sandbox, "stat -c %s big")).output == b"20971520\n"


async def test_many_files_beyond_the_disk_limit_end_the_command_and_can_be_removed(backend):
    sandbox = await backend.create(SandboxSpec(name="a", limits=LIMITS))
    fill = "for i in 1 2 3; do head -c 10M /dev/zero > $i; done"
    result = await sh(sandbox, f"{fill}; sleep 60")
    assert (result.exit_code, result.timed_out) == (137, False)
    assert result.output.endswith(b"[sandbox] disk limit of 20 MB exceeded\n")
    assert (await sh(sandbox, "rm 2 3; echo freed")).output == b"freed\n"
    quick = await sh(sandbox, fill)
    assert quick.exit_code == 137, "counted at the end as well"


NAMELESS = b"""
import os, time
held = []
for _ in range(3):
    held.append(open('f', 'wb', 0))
    os.unlink('f')
    held[-1].write(bytes(9 << 20))
time.sleep(30)
"""


async def test_files_that_were_removed_while_they_are_open_count_too(backend):
    sandbox = await backend.create(SandboxSpec(name="a", limits=LIMITS))
    await sandbox.write("nameless.py", NAMELESS)
    result = await sh(sandbox, "python3 nameless.py")
    assert result.exit_code == 137 and b"disk limit of 20 MB exceeded" in result.output, result


async def test_more_names_than_allowed_end_the_command_and_are_not_copied(backend, monkeypatch):
    monkeypatch.setattr("everlong.environments.sandboxes.layout.MAX_ENTRIES", 1000)
    sandbox = await backend.create(SandboxSpec(name="a", limits=LIMITS))
    made = await sh(sandbox, "python3 -c 'for n in range(1100): open(str(n), \"w\").close()'")
    assert made.exit_code == 137 and b"limit of 1000 names" in made.output, made
    with pytest.raises(WorkspaceTooLarge, match="1000 names"):
        await sandbox.fork(SandboxSpec(name="b"))
    if (await backend.probe()).snapshots == "copies":
        with pytest.raises(WorkspaceTooLarge, match="1000 names"):
            await sandbox.snapshot()
    assert (await sh(sandbox, "rm -f *; echo removed")).output == b"removed\n"


async def test_memory_that_nobody_maps_counts_too(backend):
    if (await backend.probe()).isolation == "none":
        pytest.skip("without namespaces shared memory is the host's")
    sandbox = await backend.create(SandboxSpec(name="a", limits=LIMITS))
    fill = "for i in 1 2 3; do head -c 18000000 /dev/zero > /dev/shm/$i || exit 1; done"
    result = await sh(sandbox, f"{fill}; python3 -c 'import time; b = bytearray(30 << 20); time.sleep(30)'")
    assert (result.exit_code, result.memory_exceeded) == (137, True)


async def test_sixty_four_at_once_all_answer(backend):
    async def one(index):
        sandbox = await backend.create(SandboxSpec(name=f"n{index}"))
        result = await sh(sandbox, f"echo {index} > f; cat f")
        await sandbox.close()
        return result.output

    outputs = await asyncio.gather(*(one(index) for index in range(64)))
    assert outputs == [f"{index}\n".encode() for index in range(64)]


async def test_commands_of_one_sandbox_run_one_after_the_other(backend):
    sandbox = await backend.create(SandboxSpec(name="a"))
    script = "test -e busy && echo overlap; echo > busy; sleep 0.1; rm busy"
    results = await asyncio.gather(*(sh(sandbox, script) for _ in range(4)))
    assert [result.output for result in results] == [b""] * 4


HIDDEN = b"""
import os
for _ in range(3000):
    os.mkdir('d')
    os.chdir('d')
for number in range(5):
    open(str(number), 'wb').write(bytes(9 << 20))
"""


async def test_what_lies_deeper_than_a_path_may_be_counts_too(backend):
    sandbox = await backend.create(SandboxSpec(name="a", limits=LIMITS))
    await sandbox.write("hide.py", HIDDEN)
    result = await sh(sandbox, "python3 hide.py")
    assert result.exit_code == 137 and b"disk limit of 20 MB exceeded" in result.output, result


async def test_a_tree_too_deep_for_a_path_is_removed(backend):
    sandbox = await backend.create(SandboxSpec(name="a"))
    await sandbox.write("deep.py", b"import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\nos.chmod('.', 0)\n")
    assert (await sh(sandbox, "python3 deep.py; mkdir locked; echo > locked/f; chmod 0 locked")).exit_code == 0
    await sandbox.close()
    assert list(backend.claim.folder.glob("s-*")) == []
