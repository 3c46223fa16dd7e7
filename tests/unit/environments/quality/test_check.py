from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from everlong.contracts.errors import Reason, SandboxError
from everlong.contracts.ports import Capabilities, Command, ExecResult, SandboxSpec
from everlong.environments.grading.verifier import check_verdict_paths
from everlong.environments.quality.check import check_tasks
from everlong.environments.tasks.harbor import HarborTask, read_task
from everlong.environments.tasks.sources import read_tasks
from everlong.environments.tasks.terminal.generate import make_terminal


@dataclass
class FakeSandbox:
    """Solved once solve.sh ran; its verifier writes what `score` says of that."""

    backend: "FakeBackend"
    spec: SandboxSpec
    solved: bool = False
    verdict: bytes | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    async def exec(self, command: Command) -> ExecResult:
        if command.argv[-1] == "/solution/solve.sh":
            self.solved = True
        else:
            self.verdict = self.backend.score(self.solved, self.name)
        return ExecResult(exit_code=0, output=b"said")

    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        if self.verdict is None or not path.endswith("reward.txt"):
            raise FileNotFoundError(path)
        return self.verdict

    async def write(self, path: str, data: bytes) -> None: ...

    async def fork(self, spec: SandboxSpec) -> "FakeSandbox":
        self.backend.open += 1
        return FakeSandbox(self.backend, spec, self.solved)

    async def close(self) -> None:
        self.backend.open -= 1


@dataclass
class FakeBackend:
    score: Callable[[bool, str], bytes | None]
    refuses: bool = False
    open: int = 0
    most: int = 0
    lives: list[float | None] = field(default_factory=list)
    scratch: Path | None = None
    real_paths: bool = True

    async def probe(self) -> Capabilities:
        return Capabilities(
            isolation="none",
            network_off=False,
            memory_limit=False,
            process_limit=False,
            real_paths=self.real_paths,
        )

    async def create(self, spec: SandboxSpec) -> FakeSandbox:
        if self.refuses:
            raise SandboxError("no more sandboxes")
        self.open += 1
        self.lives.append(spec.ttl_s)
        self.most = max(self.most, self.open)
        return FakeSandbox(self, spec)

    async def close(self) -> None: ...


@pytest.fixture
def tasks(tmp_path: Path) -> list[HarborTask]:
    make_terminal(tmp_path / "tasks", 3)
    return list(read_tasks([tmp_path / "tasks"]))


async def test_a_task_is_proven_by_green_oracle_and_red_empty_runs(tasks: list[HarborTask]):
    backend = FakeBackend(lambda solved, name: b"1" if solved else b"0")
    reports = await check_tasks(tasks, backend, repeats=3, concurrency=2)
    assert [report.task for report in reports] == [task.id for task in tasks]
    assert all(report.ok for report in reports)
    assert {report.oracle_rewards for report in reports} == {(1.0, 1.0, 1.0)}
    assert {report.empty_rewards for report in reports} == {(0.0, 0.0, 0.0)}
    assert backend.open == 0 and backend.most <= 4


@pytest.mark.parametrize(
    ("score", "problem"),
    [
        (lambda solved, name: b"1", "empty runs must all score 0, got 1, 1, 1: said"),
        (lambda solved, name: b"0", "oracle runs must all score 1, got 0, 0, 0: said"),
        (lambda solved, name: b"1" if solved and "-2" not in name else b"0", "got 1, 1, 0 (not stable)"),
        (lambda solved, name: None if solved else b"0", "got none, none, none: verifier_crash said"),
        (lambda solved, name: b"0.5" if solved else b"0", "oracle runs must all score 1, got 0.5, 0.5, 0.5"),
    ],
    ids=["accepts-nothing-done", "oracle-fails", "flaky", "no-verdict", "partial"],
)
async def test_a_task_that_must_not_teach_says_why(tasks: list[HarborTask], score, problem: str):
    (report,) = await check_tasks(tasks[:1], FakeBackend(score))
    assert not report.ok
    assert len(report.problems) == 1 and problem in report.problems[0]


FIXED = {
    "a shell's": ("test.sh", "echo 1 > /logs/verifier/reward.txt", True),
    "a helper's": ("score.py", "open('/logs/verifier/reward.txt', 'w').write('1')", True),
    "one that takes the root into account": ("test.sh", 'echo 1 > "$EVERLONG_ROOT/logs/verifier/reward.txt"', False),
    "none": ("test.sh", "exit 0", False),
}


@pytest.mark.parametrize("name", FIXED)
async def test_a_fixed_verdict_path_is_refused_where_commands_do_not_see_it(tasks: list[HarborTask], name: str):
    file, text, refused = FIXED[name]
    (Path(tasks[0].tests) / file).write_text(text + "\n")
    task = read_task(Path(tasks[0].task.folder))
    there, elsewhere = (FakeBackend(lambda solved, name: b"%d" % solved, real_paths=real) for real in (True, False))
    assert (await check_tasks([task], there))[0].ok
    await check_verdict_paths([task], there)
    (report,) = await check_tasks([task], elsewhere)
    assert report.ok == (not refused)
    if refused:
        assert f"tests/{file} of task {task.id} names /logs/verifier" in report.problems[0]
        assert elsewhere.most == 0, "nothing was run"
        with pytest.raises(ValueError, match=f"tests/{file} .* names /logs/verifier(.|\n)*EVERLONG_ROOT"):
            await check_verdict_paths([task], elsewhere)
    else:
        await check_verdict_paths([task], elsewhere)


async def test_a_task_without_a_solution_is_not_proven(tasks: list[HarborTask], tmp_path: Path):
    unsolved = msgspec.structs.replace(tasks[0], solution=None)
    (report,) = await check_tasks([unsolved], FakeBackend(lambda solved, name: b"0"))
    assert "has no solution/solve.sh: nothing shows that it can be solved" in report.problems[0]


async def test_a_failing_backend_is_a_problem_of_the_report(tasks: list[HarborTask]):
    reports = await check_tasks(tasks, FakeBackend(lambda solved, name: b"1", refuses=True))
    assert [report.problems for report in reports] == [("no more sandboxes",)] * 3


async def test_every_sandbox_has_the_time_to_live_and_a_task_that_needs_longer_is_not_proven(tasks: list[HarborTask]):
    timed = msgspec.structs.replace(tasks[0].task, agent_timeout_s=100.0, verifier_timeout_s=20.0)
    task = msgspec.structs.replace(tasks[0], task=timed)
    backend = FakeBackend(lambda solved, name: b"1" if solved else b"0")
    (short,) = await check_tasks([task], backend, ttl_s=100.0)
    assert short.problems[0].startswith("a sandbox must live longer than 125 s") and not backend.lives
    (long,) = await check_tasks([task], backend, ttl_s=130.0)
    assert long.ok and set(backend.lives) == {130.0}


async def test_a_changed_oracle_verdict_keeps_the_reason(tasks: list[HarborTask]):
    (Path(tasks[0].tests) / "test.sh").write_text("exit 0\n")
    (report,) = await check_tasks(tasks[:1], FakeBackend(lambda solved, name: b"1"), repeats=1)
    assert all(Reason.VERIFIER_CRASH in problem for problem in report.problems)
