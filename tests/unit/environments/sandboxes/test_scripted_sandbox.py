"""What only the scripted backend can do: answer by a function, move its clock, die on command."""

import pytest

from everlong.contracts.errors import SandboxError
from everlong.contracts.ports import Command, ExecResult, SandboxSpec
from everlong.environments.sandboxes.config import SandboxConfig
from everlong.environments.sandboxes.local import LocalBackend
from everlong.environments.sandboxes.opening import open_backend
from everlong.environments.sandboxes.scripted import ScriptedBackend

ECHO = Command(argv=("echo", "x"), timeout_s=1.0)


async def bash(sandbox, script):
    return await sandbox.exec(Command(argv=("bash", "-c", script), timeout_s=1.0))


async def test_commands_are_answered_by_the_function_and_remembered():
    def respond(sandbox, command):
        sandbox.files["/app/seen"] = command.argv[0].encode()
        return ExecResult(exit_code=5, output=b"answered", elapsed_s=2.0)

    backend = ScriptedBackend(respond)
    sandbox = await backend.create(SandboxSpec(name="a"))
    assert (await sandbox.exec(ECHO)).exit_code == 5
    assert await sandbox.read("seen") == b"echo"
    assert (sandbox.commands, backend.now_s) == ([ECHO], 2.0)


async def test_time_passes_only_when_told_and_the_ttl_counts_it():
    backend = ScriptedBackend()
    sandbox = await backend.create(SandboxSpec(name="a", ttl_s=10.0))
    backend.now_s = 9.9
    assert (await sandbox.exec(ECHO)).exit_code == 0
    backend.now_s = 10.0
    with pytest.raises(SandboxError, match="ttl of 10 s is over"):
        await sandbox.exec(ECHO)


async def test_a_command_that_outlasts_the_ttl_ends_with_the_error():
    backend = ScriptedBackend(lambda sandbox, command: ExecResult(exit_code=0, output=b"", elapsed_s=11.0))
    sandbox = await backend.create(SandboxSpec(name="a", ttl_s=10.0))
    with pytest.raises(SandboxError, match="ttl of 10 s is over"):
        await sandbox.exec(ECHO)


async def test_it_dies_after_as_many_commands_as_it_was_told():
    sandbox = await ScriptedBackend().create(SandboxSpec(name="a"))
    sandbox.die("the machine is gone", after_commands=1)
    assert (await sandbox.exec(ECHO)).exit_code == 0
    for call in (sandbox.exec(ECHO), sandbox.read("x"), sandbox.write("x", b""), sandbox.fork(SandboxSpec(name="b"))):
        with pytest.raises(SandboxError, match="died: the machine is gone"):
            await call
    await sandbox.close()


@pytest.mark.parametrize(
    ("script", "exit_code", "output"),
    [
        ("echo a; echo b", 0, b"a\nb\n"),
        ("echo 'two  words' > f && cat f", 0, b"two  words\n"),
        ("echo 1 > f\necho 2 >> f\ncat f f", 0, b"1\n2\n1\n2\n"),
        ("echo 'a\nb;c'", 0, b"a\nb;c\n"),
        ("cat absent && echo never", 1, b"cat: absent: No such file or directory\n"),
        ("rm -rf /", 127, b"rm: not found\n"),
        ("echo 'open", 2, b"sh: No closing quotation\n"),
        ("", 0, b""),
    ],
)
async def test_it_knows_echo_and_cat(script, exit_code, output):
    result = await bash(await ScriptedBackend().create(SandboxSpec(name="a")), script)
    assert (result.exit_code, result.output) == (exit_code, output)


async def test_closing_the_backend_closes_every_sandbox():
    backend = ScriptedBackend()
    sandbox = await backend.create(SandboxSpec(name="a"))
    await backend.close()
    with pytest.raises(SandboxError, match="is closed"):
        await sandbox.read("x")


async def test_the_config_opens_the_backend_it_names(tmp_path):
    assert isinstance(open_backend(SandboxConfig(type="scripted"), tmp_path), ScriptedBackend)
    local = open_backend(SandboxConfig(), tmp_path)
    assert isinstance(local, LocalBackend)
    assert local.claim.folder.parent == tmp_path / "sandboxes"
    await local.close()
