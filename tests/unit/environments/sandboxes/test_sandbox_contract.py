"""One suite for every backend and isolation mode; then what only real commands, and only namespaces, can show."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from everlong.contracts.errors import SandboxError
from everlong.contracts.ports import Command, Mount, SandboxSpec
from everlong.contracts.records import Limits
from everlong.environments.sandboxes.gvisor import GvisorBackend
from everlong.environments.sandboxes.local import LocalBackend
from everlong.environments.sandboxes.scripted import ScriptedBackend

EVERY = ("namespaces", "none", "scripted")
if "EVERLONG_TEST_GVISOR" in os.environ:  # a second per test: in the system tier, where `make gvisor` came first
    EVERY = ("gvisor",)
LOCAL = ("namespaces", "none")


@pytest.fixture(scope="module")
def backends(tmp_path_factory):
    """One per kind for the whole module: probing one costs a few commands."""
    made = {}

    def get(kind):
        if kind not in made:
            root = tmp_path_factory.mktemp(kind) / "sandboxes"
            if kind == "scripted":
                made[kind] = ScriptedBackend()
            elif kind == "gvisor":
                made[kind] = GvisorBackend(root)
            else:
                made[kind] = LocalBackend(root, isolation=kind)
        return made[kind]

    yield get
    for backend in made.values():
        asyncio.run(backend.close())


@pytest.fixture
async def backend(request, backends):
    try:
        made = backends(request.param)
        await made.probe()
    except SandboxError as error:
        if request.param in ("namespaces", "gvisor"):
            pytest.skip(f"this machine refuses {request.param}: {error}")
        raise
    return made


every_backend = pytest.mark.parametrize("backend", EVERY, indirect=True)
local_backend = pytest.mark.parametrize("backend", LOCAL, indirect=True)
namespaces = pytest.mark.parametrize("backend", ["namespaces"], indirect=True)
counter = iter(range(10**6))


@pytest.fixture
async def opened():
    """Opens sandboxes and closes them at the end."""
    sandboxes = []

    async def open_one(backend, **spec):
        sandbox = await backend.create(SandboxSpec(name=f"group/{next(counter)}", **spec))
        sandboxes.append(sandbox)
        return sandbox

    yield open_one
    for sandbox in sandboxes:
        await sandbox.close()


async def sh(sandbox, script, timeout_s=10.0, **command):
    return await sandbox.exec(Command(argv=("bash", "-c", script), timeout_s=timeout_s, **command))


def found_on_host(backend, sandbox, name):
    """A file of the workdir `app` of a local sandbox, where the host keeps it."""
    (home,) = backend.claim.folder.glob(f"*{sandbox.name.split('/')[1]}")
    return home / "root" / "app" / name


def running(word):
    """Process ids of this machine whose command line holds the word."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if word.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


# Every backend --------------------------------------------------------------------------------------------------------


@every_backend
async def test_a_command_gives_exit_code_and_output(backend, opened):
    sandbox = await opened(backend)
    result = await sh(sandbox, "echo hello")
    assert (result.exit_code, result.output) == (0, b"hello\n")
    assert not (result.timed_out or result.truncated or result.memory_exceeded)


@every_backend
async def test_an_unknown_program_ends_with_127(backend, opened):
    sandbox = await opened(backend)
    result = await sandbox.exec(Command(argv=("no-such-program",), timeout_s=5))
    assert (result.exit_code, result.output) == (127, b"no-such-program: not found\n")


@every_backend
async def test_what_a_command_writes_can_be_read_and_the_other_way_round(backend, opened):
    sandbox = await opened(backend)
    await sh(sandbox, "echo from inside > note")
    assert await sandbox.read("note") == b"from inside\n"
    assert await sandbox.read("/app/note", max_bytes=4) == b"from"
    await sandbox.write("deep/er/file", b"from outside")
    assert (await sh(sandbox, "cat deep/er/file")).output == b"from outside"
    await sandbox.write("deep/er/file", b"new")
    assert await sandbox.read("deep/er/file") == b"new"


@every_backend
async def test_reading_what_is_not_there_raises_file_not_found(backend, opened):
    sandbox = await opened(backend)
    with pytest.raises(FileNotFoundError):
        await sandbox.read("absent")
    with pytest.raises(FileNotFoundError):
        await sandbox.read("/tmp/absent/deeper")


@every_backend
@pytest.mark.parametrize("path", ["/etc/passwd", "../etc/passwd", "/app/../../../etc/passwd", "/logs/verifier/x"])
async def test_a_path_out_of_the_sandbox_is_refused(backend, opened, path):
    sandbox = await opened(backend)
    with pytest.raises(SandboxError, match="out of what can be read"):
        await sandbox.read(path)
    with pytest.raises(SandboxError, match="out of what can be read"):
        await sandbox.write(path, b"x")


@every_backend
async def test_further_writable_folders_start_empty(backend, opened):
    sandbox = await opened(backend, writable=("/logs/verifier",))
    with pytest.raises(FileNotFoundError):
        await sandbox.read("/logs/verifier/reward.txt")
    await sandbox.write("/logs/verifier/reward.txt", b"1")
    assert await sandbox.read("/logs/verifier/reward.txt") == b"1"


@every_backend
async def test_output_beyond_the_limit_is_cut_and_said(backend, opened):
    sandbox = await opened(backend, limits=Limits(output_bytes=4))
    result = await sh(sandbox, "echo 123456789")
    assert (result.output, result.truncated) == (b"1234", True)
    exact = await sh(sandbox, "echo 123")
    assert (exact.output, exact.truncated) == (b"123\n", False)


@every_backend
async def test_a_sandbox_starts_with_a_copy_of_its_files(backend, opened, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "data").write_bytes(b"given")
    sandbox = await opened(backend, files=str(tmp_path), workdir="/data/here")
    assert await sandbox.read("sub/data") == b"given"
    await sandbox.write("sub/data", b"changed")
    assert (tmp_path / "sub" / "data").read_bytes() == b"given"


@every_backend
async def test_a_fork_has_the_workdir_and_goes_its_own_way(backend, opened):
    sandbox = await opened(backend, writable=("/logs/agent",))
    await sandbox.write("state", b"before")
    await sandbox.write("/logs/agent/log", b"stays behind")
    fork = await sandbox.fork(SandboxSpec(name="the/fork", workdir="/elsewhere", writable=("/logs/agent",)))
    try:
        await sandbox.write("state", b"after")
        assert await fork.read("state") == b"before"
        assert fork.name == "the/fork"
        with pytest.raises(FileNotFoundError):
            await fork.read("/logs/agent/log")
        with pytest.raises(ValueError, match=r"spec\.files must be None"):
            await sandbox.fork(SandboxSpec(name="other", files="/tmp"))
    finally:
        await fork.close()


@every_backend
async def test_a_closed_sandbox_says_so_and_closing_again_is_nothing(backend, opened):
    sandbox = await opened(backend)
    await sandbox.close()
    await sandbox.close()
    for call in (sh(sandbox, "echo"), sandbox.read("x"), sandbox.write("x", b""), sandbox.fork(SandboxSpec(name="f"))):
        with pytest.raises(SandboxError, match="is closed: close was called"):
            await call


@every_backend
async def test_a_name_is_taken_until_its_sandbox_is_closed(backend):
    first = await backend.create(SandboxSpec(name="same"))
    with pytest.raises(SandboxError, match="'same' is open already"):
        await backend.create(SandboxSpec(name="same"))
    await first.write("left", b"x")
    await first.close()
    second = await backend.create(SandboxSpec(name="same"))
    with pytest.raises(FileNotFoundError):
        await second.read("left")
    await second.close()


@every_backend
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"workdir": "app"}, id="relative"),
        pytest.param({"workdir": "/"}, id="root"),
        pytest.param({"workdir": "/app/../usr"}, id="not-plain"),
        pytest.param({"workdir": "/usr/app"}, id="system"),
        pytest.param({"writable": ("/app/logs",)}, id="nested"),
        pytest.param({"mounts": (Mount(source="/no/such/folder", target="/tests"),)}, id="absent-mount"),
        pytest.param({"files": "/no/such/folder"}, id="absent-files"),
        pytest.param({"ttl_s": 0.0}, id="ttl"),
        pytest.param({"name": ""}, id="no-name"),
        pytest.param({"name": "n" * 300}, id="long-name"),
    ],
)
async def test_a_spec_that_cannot_be_is_refused(backend, spec):
    with pytest.raises(ValueError):
        await backend.create(SandboxSpec(**{"name": "bad", **spec}))


@every_backend
@pytest.mark.parametrize("command", [{"argv": ()}, {"timeout_s": 0.0}, {"timeout_s": float("inf")}])
async def test_a_command_without_words_or_time_is_refused(backend, opened, command):
    sandbox = await opened(backend)
    with pytest.raises(ValueError, match="argv and a finite timeout_s"):
        await sandbox.exec(Command(**{"argv": ("true",), "timeout_s": 1.0, **command}))


# Pauses and snapshots -------------------------------------------------------------------------------------------------


@every_backend
async def test_a_paused_sandbox_refuses_everything_until_it_is_resumed(backend, opened):
    sandbox = await opened(backend)
    await sandbox.write("note", b"kept")
    await sandbox.pause()
    await sandbox.pause()
    for call in (sh(sandbox, "echo"), sandbox.read("note"), sandbox.write("note", b""), sandbox.snapshot()):
        with pytest.raises(SandboxError, match="is paused: resume it first"):
            await call
    await sandbox.resume()
    await sandbox.resume()
    assert (await sh(sandbox, "cat note")).output == b"kept"


@every_backend
async def test_a_pause_to_disk_keeps_everything_or_is_refused_by_name(backend, opened):
    sandbox = await opened(backend)
    await sh(sandbox, "echo there > note")
    if (await backend.probe()).pause_to_disk:
        await sandbox.pause("disk")
        await sandbox.resume()
    else:
        with pytest.raises(ValueError, match="cannot put the memory of processes on disk"):
            await sandbox.pause("disk")
    assert await sandbox.read("note") == b"there\n"


@every_backend
async def test_a_paused_sandbox_can_be_closed(backend, opened):
    sandbox = await opened(backend)
    await sandbox.pause()
    await sandbox.close()
    with pytest.raises(SandboxError, match="is closed"):
        await sandbox.read("note")


@every_backend
async def test_rollback_brings_back_what_was_changed_made_and_removed(backend, opened):
    sandbox = await opened(backend, writable=("/logs/agent",))
    for path in ("changed", "/tmp/removed", "/logs/agent/changed"):
        await sandbox.write(path, b"before")
    snapshot = await sandbox.snapshot()
    for _ in range(2):
        for path in ("changed", "made", "/tmp/removed", "/logs/agent/changed"):
            await sandbox.write(path, b"after")
        await sandbox.rollback(snapshot)
        assert [await sandbox.read(path) for path in ("changed", "/tmp/removed", "/logs/agent/changed")] == [
            b"before"
        ] * 3
        with pytest.raises(FileNotFoundError):
            await sandbox.read("made")
    await backend.drop(snapshot)
    await backend.drop(snapshot)
    with pytest.raises(ValueError, match="is not kept here"):
        await sandbox.rollback(snapshot)


@every_backend
async def test_sandboxes_restored_from_one_snapshot_go_their_own_ways(backend, opened):
    sandbox = await opened(backend)
    await sandbox.write("state", b"shared")
    first = await sandbox.snapshot()
    await sandbox.write("state", b"later")
    second = await sandbox.snapshot(first)
    assert second.parent == first.id
    names = (f"fork/{next(counter)}", f"fork/{next(counter)}")
    a, b = await backend.restore(second, names)
    await backend.drop(first)
    await backend.drop(second)
    try:
        assert (a.name, b.name) == names
        await sh(a, "echo a > state")
        assert [await one.read("state") for one in (a, b, sandbox)] == [b"a\n", b"later", b"later"]
        third = await sandbox.snapshot()
        with pytest.raises(SandboxError, match="is open already"):
            await backend.restore(third, (a.name,))
        await backend.drop(third)
    finally:
        await a.close()
        await b.close()


@every_backend
async def test_a_grading_fork_holds_what_lies_in_layers_too(backend, opened):
    sandbox = await opened(backend)
    await sandbox.write("old/below", b"1")
    await sandbox.write("old/changed", b"1")
    await backend.drop(await sandbox.snapshot())
    await sandbox.write("old/changed", b"2")
    fork = await sandbox.fork(SandboxSpec(name=f"graded/{next(counter)}", workdir="/work"))
    try:
        assert [await fork.read(name) for name in ("old/below", "old/changed")] == [b"1", b"2"]
    finally:
        await fork.close()


# Real commands --------------------------------------------------------------------------------------------------------


@local_backend
@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 3", 3),
        ("kill -9 $$", 137),
        ("kill -TERM $$", 143),
        ("false | true", 0),
        ("set -o pipefail; false | true", 1),
    ],
)
async def test_exit_codes_are_the_shells(backend, opened, script, code):
    assert (await sh(await opened(backend), script)).exit_code == code


@local_backend
async def test_a_background_child_neither_delays_nor_outlives_its_command(backend, opened):
    sandbox = await opened(backend)
    began = time.monotonic()
    result = await sh(sandbox, "setsid sleep 7654.25 & (sleep 7654.25 &) ; echo hi", timeout_s=300)
    assert (result.exit_code, result.output, result.timed_out) == (0, b"hi\n", False)
    assert time.monotonic() - began < 150, "it waited for the child, up to the limit"
    assert running("7654.25") == []


@local_backend
async def test_standard_input_is_closed(backend, opened):
    assert (await sh(await opened(backend), "read x; echo $? [$x]")).output == b"1 []\n"


@local_backend
async def test_nothing_of_our_environment_leaks(backend, opened, monkeypatch):
    monkeypatch.setenv("SECRET_API_KEY", "sk-host")
    sandbox = await opened(backend, env={"FROM_SPEC": "1", "BOTH": "spec"})
    result = await sh(sandbox, "env -0 | sort -z | cut -z -d= -f1 | tr '\\0' ' '; echo $BOTH", env={"BOTH": "command"})
    names = set(result.output.decode().split())
    ours = {"PATH", "HOME", "LANG", "TZ", "FROM_SPEC", "BOTH", "command"}
    assert names >= ours
    assert names - ours - {"PWD", "SHLVL", "_"} <= {"TMPDIR", "EVERLONG_ROOT", "EVERLONG_SANDBOX"}
    assert b"sk-host" not in (await sh(sandbox, "cat /proc/self/environ /proc/$PPID/environ 2>/dev/null")).output


@local_backend
async def test_a_folder_that_is_not_there_and_words_no_program_can_take_are_the_commands_failure(backend, opened):
    sandbox = await opened(backend)
    result = await sh(sandbox, "echo", cwd="absent")
    assert (result.exit_code, result.output) == (1, b"cd: /app/absent: No such file or directory\n")
    result = await sh(sandbox, "echo \0")
    assert (result.exit_code, result.output) == (126, b"sandbox: embedded null byte\n")
    assert (await sh(sandbox, "x" * (1 << 18))).exit_code == 126
    assert (await sh(sandbox, "\ud800")).exit_code == 126


@local_backend
async def test_links_are_followed_inside_and_never_out(backend, opened, tmp_path):
    (tmp_path / "host-secret").write_bytes(b"secret")
    sandbox = await opened(backend, writable=("/logs/verifier",))
    home = "/home/somebody/secret"
    await sh(
        sandbox,
        f"ln -s {home} out; ln -s {tmp_path}/host-secret tmp; ln -s ../../../../etc/passwd up; ln -s a b; ln -s b a",
    )
    await sh(sandbox, "mkdir d; echo in > d/f; ln -s /app/d/f absolute; ln -s d/f relative; ln -s / top")
    for path in ("out", "up", "top/etc/passwd", "a"):
        with pytest.raises(SandboxError):
            await sandbox.read(path)
        with pytest.raises(SandboxError):
            await sandbox.write(path, b"overwritten")
    with pytest.raises(FileNotFoundError):
        await sandbox.read("tmp")
    await sandbox.write("tmp", b"in the /tmp of the sandbox")
    assert (tmp_path / "host-secret").read_bytes() == b"secret"
    assert await sandbox.read("absolute") == await sandbox.read("relative") == b"in\n"
    await sandbox.write("absolute", b"through")
    assert await sandbox.read("d/f") == b"through"


@local_backend
async def test_pipes_and_folders_where_a_file_was_expected_do_not_block(backend, opened):
    sandbox = await opened(backend)
    await sh(sandbox, "mkfifo pipe; mkdir folder; echo x > file")
    for path in ("pipe", "folder", "file/deeper", "/app"):
        with pytest.raises(FileNotFoundError):
            await sandbox.read(path)
    for path in ("pipe", "folder"):
        with pytest.raises(SandboxError):
            await sandbox.write(path, b"x")


@local_backend
async def test_a_fork_keeps_modes_links_and_holes_and_skips_pipes(backend, opened):
    sandbox = await opened(backend)
    await sh(
        sandbox,
        "echo '#!/bin/sh' > run; chmod 751 run; ln -s /etc/passwd link; mkfifo pipe; mkdir -m 555 ro;"
        "truncate -s 1G sparse; echo end >> sparse; touch -d 2001-01-01 old; mkdir -p d/e; echo deep > d/e/f",
    )
    fork = await sandbox.fork(SandboxSpec(name="kept"))
    result = await sh(
        fork, "stat -c '%A %N' run link ro; ls; stat -c %y old; cat d/e/f; tail -c 4 sparse; du -sm sparse"
    )
    await fork.close()
    assert result.output.decode().splitlines() == [
        "-rwxr-x--x 'run'",
        "lrwxrwxrwx 'link' -> '/etc/passwd'",
        "dr-xr-xr-x 'ro'",
        *("d", "link", "old", "ro", "run", "sparse"),
        "2001-01-01 00:00:00.000000000 +0000",
        "deep",
        "end",
        "1\tsparse",
    ]


@local_backend
async def test_a_cancelled_call_leaves_no_process(backend, opened):
    sandbox = await opened(backend)
    task = asyncio.create_task(sh(sandbox, "echo > started; sleep 7654.5", timeout_s=300))
    await until(sandbox, "started")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running("7654.5") == []
    assert (await sh(sandbox, "echo again")).output == b"again\n"


@local_backend
async def test_closing_ends_the_running_command_with_an_error(backend, opened):
    sandbox = await opened(backend)
    task = asyncio.create_task(sh(sandbox, "echo > started; sleep 7654.75", timeout_s=300))
    await until(sandbox, "started")
    await sandbox.close()
    with pytest.raises(SandboxError, match="is closed: close was called"):
        await task
    assert running("7654.75") == []


async def until(sandbox, path):
    for _ in range(2000):
        try:
            await sandbox.read(path)
            return
        except FileNotFoundError:
            await asyncio.sleep(0.01)
    raise AssertionError(f"{path} never appeared")


@local_backend
async def test_the_ttl_closes_a_sandbox_whatever_runs(backend, opened):
    sandbox = await opened(backend, ttl_s=0.2)
    with pytest.raises(SandboxError, match=r"its ttl of 0\.2 s is over"):
        await sh(sandbox, "sleep 300", timeout_s=300)
    with pytest.raises(SandboxError, match=r"its ttl of 0\.2 s is over"):
        await sandbox.read("x")


@local_backend
async def test_the_same_command_gives_the_same_bytes_in_another_sandbox(backend, opened):
    script = "umask; date -d @0; stat -c '%A %u' $HOME; [ -t 0 ] || echo no terminal"
    first = await sh(await opened(backend), script)
    assert first.output == (await sh(await opened(backend), script)).output
    assert first.output.startswith(b"0022\nThu Jan  1 00:00:00 UTC 1970\n")


# Namespaces -----------------------------------------------------------------------------------------------------------


@namespaces
async def test_the_host_is_not_there(backend, opened, tmp_path):
    (tmp_path / "secret").write_text("x")
    sandbox = await opened(backend)
    assert (await sh(sandbox, f"cat {tmp_path}/secret || ls /root || ls /home")).exit_code == 2
    listed = set((await sh(sandbox, "ls /")).output.decode().split())
    libraries = {f"lib{kind}" for kind in ("", "32", "64", "x32")}
    assert listed <= {"app", "bin", "dev", "etc", "proc", "run", "sbin", "tmp", "usr", "var"} | libraries
    processes = await sh(sandbox, "ls /proc | grep -c '^[0-9]'; cat /proc/*/cmdline | tr '\\0' ' '; hostname")
    assert int(processes.output.split()[0]) <= 5
    assert str(tmp_path.parts[1]).encode() not in processes.output
    assert processes.output.endswith(b"sandbox\n")


@namespaces
async def test_only_its_own_folders_can_be_written(backend, opened, tmp_path):
    (tmp_path / "test.sh").write_text("echo mounted")
    sandbox = await opened(
        backend, workdir="/work", writable=("/logs/verifier",), mounts=(Mount(source=str(tmp_path), target="/tests"),)
    )
    for path in (
        "/x",
        "/etc/x",
        "/usr/x",
        "/usr/bin/x",
        "/tests/x",
        "/tests/test.sh",
        "/logs/x",
        "/proc/sys/kernel/hostname",
    ):
        assert (await sh(sandbox, f"echo no > {path}")).exit_code != 0, path
    assert not (tmp_path / "x").exists()
    result = await sh(
        sandbox, "for d in . /tmp /logs/verifier /dev/shm; do echo > $d/x || echo no $d; done; bash /tests/test.sh"
    )
    assert result.output == b"mounted\n"
    assert (await sh(sandbox, "ls /tmp /work")).output == b"/tmp:\nx\n\n/work:\nx\n"


@namespaces
async def test_a_command_has_no_capability_and_can_get_none(backend, opened):
    sandbox = await opened(backend)
    result = await sh(
        sandbox, "id -u; grep -E '^(Cap|NoNewPrivs)' /proc/self/status | cut -f2 | sort -u | tr '\\n' ' '"
    )
    assert result.output == b"1000\n0000000000000000 1 "
    for attempt in ("unshare -U true", "mount -t tmpfs x /tmp", "kill -9 1", "cat /proc/1/environ", "umount /usr"):
        assert (await sh(sandbox, attempt)).exit_code != 0, attempt


REACH = "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname()); print('lo')\n"


@namespaces
async def test_the_network_is_only_lo(backend, opened):
    sandbox = await opened(backend)
    result = await sh(sandbox, "cut -d: -f1 /proc/net/dev | tail -n +3; echo > /dev/tcp/192.0.2.1/80")
    assert result.output.split(b"\n")[0].strip() == b"lo"
    assert b"Network is unreachable" in result.output
    await sandbox.write("reach.py", REACH.encode())
    assert (await sh(sandbox, "python3 reach.py")).output == b"lo\n"


@namespaces
async def test_a_network_that_was_asked_for_is_the_hosts(backend, opened):
    sandbox = await opened(backend, network=True)
    inside = await sh(sandbox, "cut -d: -f1 /proc/net/dev | tail -n +3")
    assert inside.output.split() == [line.split(b":")[0].strip() for line in host_devices()]


def host_devices():
    return Path("/proc/net/dev").read_bytes().splitlines()[2:]


@namespaces
async def test_root_of_the_host_never_runs_a_command(backend, opened):
    sandbox = await opened(backend)
    await sh(sandbox, "echo > made")
    made = next(backend.claim.folder.glob(f"*{sandbox.name.split('/')[1]}/root/app/made"))
    assert made.stat().st_uid == (65534 if os.geteuid() == 0 else os.geteuid())


# Without namespaces ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["none"], indirect=True)
async def test_without_namespaces_whole_paths_lead_into_the_copy(backend, opened, tmp_path):
    (tmp_path / "test.sh").write_text('cat "$EVERLONG_ROOT/app/sub/f"; echo > "$REWARD"')
    sandbox = await opened(
        backend,
        env={"REWARD": "/logs/verifier/reward.txt"},
        writable=("/logs/verifier",),
        mounts=(Mount(source=str(tmp_path), target="/tests"),),
    )
    await sandbox.write("sub/f", b"content")
    result = await sandbox.exec(Command(argv=("bash", "/tests/test.sh"), timeout_s=10, cwd="/app/sub"))
    assert result.output == b"content"
    assert await sandbox.read("/logs/verifier/reward.txt") == b"\n"


@pytest.mark.parametrize("backend", ["none"], indirect=True)
async def test_capabilities_without_namespaces_promise_no_isolation(backend):
    capabilities = await backend.probe()
    assert (capabilities.isolation, capabilities.network_off) == ("none", False)
    assert "network included" in capabilities.reason


@namespaces
async def test_capabilities_with_namespaces_name_how_memory_is_held(backend):
    capabilities = await backend.probe()
    assert (capabilities.isolation, capabilities.network_off, capabilities.process_limit) == ("namespaces", True, True)
    assert "memory is held by a control group" in capabilities.reason or "memory is sampled" in capabilities.reason


# Layers ---------------------------------------------------------------------------------------------------------------


@local_backend
async def test_what_a_command_does_to_a_layer_is_seen_from_outside(backend, opened):
    sandbox = await opened(backend)
    await sh(sandbox, "mkdir -p d/e gone && echo 1 > d/e/f && echo 1 > removed && echo 1 > gone/x && ln -s d/e link")
    snapshot = await sandbox.snapshot()
    done = await sh(
        sandbox, "rm removed && rm -r gone && mkdir gone && echo 2 > gone/y && echo 2 >> d/e/f && mkdir d/e/new"
    )
    assert (done.exit_code, done.output) == (0, b"")
    assert await sandbox.read("link/f") == b"1\n2\n"
    assert await sandbox.read("gone/y") == b"2\n"
    for path in ("removed", "gone/x"):
        with pytest.raises(FileNotFoundError):
            await sandbox.read(path)
    await sandbox.write("removed", b"again")
    await sandbox.write("d/e/g", b"beside")
    await sandbox.write("gone/x/deep", b"a folder now")
    assert (
        await sh(sandbox, "cat removed d/e/g d/e/f gone/x/deep; ls gone")
    ).output == b"againbeside1\n2\na folder nowx\ny\n"
    fork = await sandbox.fork(SandboxSpec(name=f"merged/{next(counter)}"))
    assert (await sh(fork, "cat d/e/f; ls gone; readlink link")).output == b"1\n2\nx\ny\nd/e\n"
    await fork.close()
    await sandbox.rollback(snapshot)
    assert (await sh(sandbox, "cat removed gone/x; ls -R | wc -l")).output.startswith(b"1\n1\n")
    await backend.drop(snapshot)


@local_backend
async def test_a_restored_sandbox_has_its_mounts(backend, opened, tmp_path):
    (tmp_path / "given").write_bytes(b"given")
    sandbox = await opened(backend, mounts=(Mount(source=str(tmp_path), target="/tests"),))
    snapshot = await sandbox.snapshot()
    (clone,) = await backend.restore(snapshot, (f"mounted/{next(counter)}",))
    await backend.drop(snapshot)
    assert (await clone.exec(Command(argv=("cat", "/tests/given"), timeout_s=10))).output == b"given"
    await clone.close()


@namespaces
async def test_a_snapshot_copies_nothing_and_a_deep_stack_becomes_one_layer(backend, opened):
    if (await backend.probe()).snapshots != "layers":
        pytest.skip("this machine mounts no overlays")
    before = set(backend.claim.folder.glob("layers/*"))
    sandbox = await opened(backend)
    await sh(sandbox, "head -c 1000000 /dev/zero > large; echo > d0")
    inode = found_on_host(backend, sandbox, "large").stat().st_ino
    kept = [await sandbox.snapshot()]
    assert [path.stat().st_ino for path in backend.claim.folder.glob("layers/*/app/large")] == [inode]
    for index in range(1, 40):
        await sandbox.write(f"d{index}", b"x")
        kept.append(await sandbox.snapshot(kept[-1]))
    assert (await sh(sandbox, "ls | wc -l")).output == b"41\n"
    await sandbox.rollback(kept[4])
    assert (await sh(sandbox, "ls")).output == b"d0\nd1\nd2\nd3\nd4\nlarge\n"
    for one in kept:
        await backend.drop(one)
    await sandbox.close()
    assert set(backend.claim.folder.glob("layers/*")) == before


@local_backend
async def test_a_paused_command_stands_still_and_its_time_too(backend, opened):
    sandbox = await opened(backend)
    script = "for i in 1 2 3 4 5 6; do echo $i >> steps; sleep 0.1; done"
    running_command = asyncio.create_task(sh(sandbox, script, timeout_s=1.5))
    while True:
        try:
            await sandbox.read("steps")
            break
        except FileNotFoundError:
            await asyncio.sleep(0.01)
    await sandbox.pause()
    await asyncio.sleep(0.3)
    steps = found_on_host(backend, sandbox, "steps")
    before = steps.read_bytes()
    await asyncio.sleep(1.6)  # longer than its time limit
    assert steps.read_bytes() == before
    assert not running_command.done()
    await sandbox.resume()
    result = await running_command
    assert (result.exit_code, result.timed_out) == (0, False)
    assert steps.read_bytes() == b"1\n2\n3\n4\n5\n6\n"


@local_backend
async def test_a_command_cannot_keep_processes_in_a_local_sandbox(backend, opened):
    sandbox = await opened(backend)
    with pytest.raises(ValueError, match="leave keep_processes out"):
        await sh(sandbox, "true", keep_processes=True)
