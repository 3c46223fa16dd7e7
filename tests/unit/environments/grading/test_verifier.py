from dataclasses import dataclass, field
from pathlib import Path

import pytest

from everlong.contracts.errors import Reason, SandboxError
from everlong.contracts.ports import Command, ExecResult, SandboxSpec
from everlong.environments.grading.verifier import check_time_budget, grade, parse_reward
from everlong.environments.tasks.harbor import HarborTask, read_task
from everlong.environments.tasks.terminal.generate import make_terminal

TXT, JSON = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"


@dataclass
class FakeSandbox:
    """In memory: `verify` stands for the verifier, writes into the files of the copy and says how the command ended."""

    verify: object = None
    files: dict[str, bytes] = field(default_factory=dict)
    name: str = "episode"
    specs: list[SandboxSpec] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)

    async def exec(self, command: Command) -> ExecResult:
        self.commands.append(command)
        return self.verify(self.files)

    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path][:max_bytes]

    async def write(self, path: str, data: bytes) -> None:
        self.files[path] = data

    async def fork(self, spec: SandboxSpec) -> "FakeSandbox":
        self.specs.append(spec)
        return FakeSandbox(self.verify, {}, spec.name, self.specs, self.commands, self.closed)

    async def close(self) -> None:
        self.closed.append(self.name)


def verifier(exit_code: int = 0, output: bytes = b"", timed_out: bool = False, **written: bytes):
    def verify(files: dict[str, bytes]) -> ExecResult:
        files.update({f"/logs/verifier/reward.{ending}": data for ending, data in written.items()})
        return ExecResult(exit_code=exit_code, output=output, timed_out=timed_out)

    return verify


@pytest.fixture
def task(tmp_path: Path) -> HarborTask:
    return read_task(make_terminal(tmp_path, 1)[0])


@pytest.mark.parametrize(
    ("verify", "reward", "reason"),
    [
        (verifier(137), None, Reason.VERIFIER_CRASH),
        (verifier(txt=b""), None, Reason.VERIFIER_CRASH),
        (verifier(txt=b"abc"), None, Reason.VERIFIER_CRASH),
        (verifier(txt=b"0"), 0.0, None),
        (verifier(txt=b"nan"), None, Reason.VERIFIER_CRASH),
        (verifier(json=b'{"reward": Infinity}'), None, Reason.VERIFIER_CRASH),
        (verifier(txt=b"1e39"), None, Reason.VERIFIER_CRASH),
        (verifier(json=b'{"reward": -1e38}'), None, Reason.VERIFIER_CRASH),
        (verifier(txt=b"1e37"), 1e37, None),
        (verifier(json=b'{"score": 1}'), None, Reason.VERIFIER_CRASH),
        (verifier(json=b"{"), None, Reason.VERIFIER_CRASH),
        (verifier(1, txt=b"1\n"), 1.0, None),
        (verifier(json=b'{"reward": 0.25, "tests": 4}'), 0.25, None),
        (verifier(json=b"-2.5"), -2.5, None),
        (verifier(json=b"0.5", txt=b"1"), 0.5, None),
        (verifier(124, timed_out=True, txt=b"1"), None, Reason.VERIFIER_TIMEOUT),
    ],
    ids=["killed", "empty", "word", "zero", "nan", "infinity", "beyond-float32", "difference-beyond-float32", "large", "no-key", "bad-json", "exit-1", "json-key", "json-number",
         "json-first", "timeout"],
)  # fmt: skip
async def test_only_a_finite_number_is_a_verdict(task: HarborTask, verify, reward: float | None, reason: Reason | None):
    verdict = await grade(task, FakeSandbox(verify))
    assert (verdict.reward, verdict.reason, verdict.flags) == (reward, reason, ())


async def test_the_verifier_runs_on_a_copy_with_its_own_tests_tools_and_verdict_folder(task: HarborTask):
    sandbox = FakeSandbox(verifier(txt=b"1"))
    await grade(task, sandbox)
    (spec,), (command,) = sandbox.specs, sandbox.commands
    assert [(mount.source, mount.target) for mount in spec.mounts] == [(task.tests, "/tests")]
    assert (spec.writable, spec.files, spec.workdir) == (("/logs/verifier",), None, "/app")
    assert spec.env["PATH"] == "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert not spec.env["HOME"].startswith("/app")
    assert (command.argv, command.timeout_s) == (("bash", "/tests/test.sh"), 20.0)
    assert sandbox.closed == ["episode-grade-0"]


@pytest.mark.parametrize(("honest", "reward"), [(b"0", 0.0), (b"1", 1.0)])
async def test_a_planted_verdict_is_flagged_and_counts_nothing(task: HarborTask, honest: bytes, reward: float):
    sandbox = FakeSandbox(verifier(txt=honest), {TXT: b"1", JSON: b"1"})
    verdict = await grade(task, sandbox)
    assert (verdict.reward, verdict.flags) == (reward, ("verdict_preexisting",))


async def test_a_sandbox_that_dies_while_scoring_is_retried_three_times(task: HarborTask):
    def dies(files: dict[str, bytes]) -> ExecResult:
        raise SandboxError("the sandbox was killed")

    sandbox = FakeSandbox(dies)
    verdict = await grade(task, sandbox)
    assert (verdict.reward, verdict.reason) == (None, Reason.SANDBOX_CRASH)
    assert verdict.output.count("the sandbox was killed") == 3
    assert sandbox.closed == ["episode-grade-0", "episode-grade-1", "episode-grade-2"]


async def test_a_second_copy_gives_the_verdict_when_the_first_dies(task: HarborTask):
    deaths = iter([True])

    def dies_once(files: dict[str, bytes]) -> ExecResult:
        if next(deaths, False):
            raise SandboxError("the sandbox was killed")
        return verifier(txt=b"1")(files)

    assert (await grade(task, FakeSandbox(dies_once))).reward == 1.0


async def test_tests_that_changed_after_reading_give_no_verdict(task: HarborTask):
    (Path(task.tests) / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    sandbox = FakeSandbox(verifier(txt=b"1"))
    verdict = await grade(task, sandbox)
    assert (verdict.reward, verdict.flags, sandbox.commands) == (None, ("task_changed",), [])


async def test_the_end_of_the_verifiers_output_is_kept(task: HarborTask):
    verdict = await grade(task, FakeSandbox(verifier(3, output=b"x" * 9000 + b"last words\xff")))
    assert "last words\ufffd" in verdict.output and "exit code 3" in verdict.output
    assert "wrote neither reward.json nor reward.txt" in verdict.output
    assert len(verdict.output) < 4200


@pytest.mark.parametrize("raw", [b"true", b"[1]", b"1" + b"0" * 400, b'{"reward": "1"}', b"null"])
def test_json_that_is_no_number_is_refused(raw: bytes):
    with pytest.raises(ValueError, match=r"reward.json must hold a finite number of at most 4.25e\+37, got "):
        parse_reward(raw, "reward.json")


def test_a_sandbox_must_outlive_agent_and_verifier():
    with pytest.raises(
        ValueError, match=r"must live longer than 125 s \(agent 100 s, verifier 20 s, margin 5 s\), got ttl 100 s"
    ):
        check_time_budget(100, 20, 100)
    with pytest.raises(ValueError, match="must live longer"):
        check_time_budget(100, 20, 125)
    check_time_budget(100, 20, 130)
