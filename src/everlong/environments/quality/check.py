"""Proves tasks before they teach: several oracle runs must all score 1 and as many empty runs all 0."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from everlong.contracts.errors import SandboxError
from everlong.contracts.ports import Command, Mount, SandboxBackend
from everlong.contracts.records import Record, Verdict
from everlong.environments.grading.verifier import check_time_budget, fixed_verdict_path, grade
from everlong.environments.tasks.harbor import HarborTask
from everlong.environments.tasks.opening import open_task


class TaskReport(Record, frozen=True, kw_only=True):
    """What the runs of one task scored; None where a run gave no verdict."""

    task: str
    kind: str
    oracle_rewards: tuple[float | None, ...]
    empty_rewards: tuple[float | None, ...]
    problems: tuple[str, ...] = ()
    """Why the task must not teach; none for a task that is proven."""
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


async def check_tasks(
    tasks: Iterable[HarborTask],
    backend: SandboxBackend,
    repeats: int = 3,
    concurrency: int = 4,
    ttl_s: float | None = None,
) -> list[TaskReport]:
    """One report per task, in their order. At most `concurrency` tasks are checked at once. Raises SandboxError where the
    backend can make no sandbox at all.

    `ttl_s`: after which every sandbox is closed; a task whose time limits need longer is not proven.
    """
    if repeats < 1 or concurrency < 1:
        raise ValueError(f"repeats and concurrency must be at least 1, got {repeats} and {concurrency}")
    slots = asyncio.Semaphore(concurrency)
    real_paths = (await backend.probe()).real_paths

    async def check(number: int, task: HarborTask) -> TaskReport:
        async with slots:
            lost = None if real_paths else fixed_verdict_path(task)
            if lost is not None:
                return _refused(task, lost)
            return await _check_task(task, backend, repeats, f"check-{number}", ttl_s)

    return list(await asyncio.gather(*(check(number, task) for number, task in enumerate(tasks))))


async def run_oracle(task: HarborTask, backend: SandboxBackend, name: str, ttl_s: float | None = None) -> Verdict:
    """Run the task's own solution in a fresh sandbox and grade what it leaves. Raises SandboxError, ValueError without one."""
    if task.solution is None:
        raise ValueError(f"task {task.id} has no solution/solve.sh: nothing shows that it can be solved")
    mount = Mount(source=task.solution, target="/solution")
    sandbox = await open_task(task, backend, name, ttl_s=ttl_s, mounts=(mount,))
    try:
        command = Command(
            argv=("bash", "/solution/solve.sh"), timeout_s=task.task.agent_timeout_s, env=task.solution_env
        )
        result = await sandbox.exec(command)
        verdict = await grade(task, sandbox)
    finally:
        await sandbox.close()
    if result.exit_code != 0 and verdict.reward != 1.0:
        said = result.output.decode(errors="replace")[-1000:]
        return Verdict(
            reward=verdict.reward,
            reason=verdict.reason,
            flags=verdict.flags,
            output=f"solve.sh ended with exit code {result.exit_code}: {said}\n{verdict.output}",
        )
    return verdict


async def run_empty(task: HarborTask, backend: SandboxBackend, name: str, ttl_s: float | None = None) -> Verdict:
    """Grade a fresh sandbox in which nothing was done. Raises SandboxError."""
    sandbox = await open_task(task, backend, name, ttl_s=ttl_s)
    try:
        return await grade(task, sandbox)
    finally:
        await sandbox.close()


async def _check_task(
    task: HarborTask, backend: SandboxBackend, repeats: int, name: str, ttl_s: float | None
) -> TaskReport:
    oracle: list[Verdict] = []
    empty: list[Verdict] = []
    problems: list[str] = []
    try:
        if ttl_s is not None:
            check_time_budget(task.task.agent_timeout_s, task.task.verifier_timeout_s, ttl_s)
        for repeat in range(repeats):
            empty.append(await run_empty(task, backend, f"{name}-empty-{repeat}", ttl_s))
            oracle.append(await run_oracle(task, backend, f"{name}-oracle-{repeat}", ttl_s))
    except (SandboxError, ValueError) as error:
        problems.append(str(error))
    problems += _problems("oracle", 1.0, oracle) + _problems("empty", 0.0, empty)
    return TaskReport(
        task=task.id,
        kind=task.task.kind,
        oracle_rewards=tuple(verdict.reward for verdict in oracle),
        empty_rewards=tuple(verdict.reward for verdict in empty),
        problems=tuple(problems),
        notes=task.notes,
    )


def _refused(task: HarborTask, why: str) -> TaskReport:
    return TaskReport(
        task=task.id, kind=task.task.kind, oracle_rewards=(), empty_rewards=(), problems=(why,), notes=task.notes
    )


def _problems(run: str, expected: float, verdicts: list[Verdict]) -> list[str]:
    wrong = [verdict for verdict in verdicts if verdict.reward != expected]
    if not wrong:
        return []
    is_stable = len({verdict.reward for verdict in verdicts}) == 1
    scored = ", ".join("none" if verdict.reward is None else f"{verdict.reward:g}" for verdict in verdicts)
    shown = " ".join(filter(None, (str(wrong[0].reason or ""), _ends(wrong[0].output.strip()))))
    stability = "" if is_stable else " (not stable)"
    return [f"{run} runs must all score {expected:g}, got {scored}{stability}: {shown or 'the verifier said nothing'}"]


def _ends(output: str) -> str:
    """How it begins says what ended, how it ends says why."""
    return output if len(output) <= 300 else f"{output[:60]} … {output[-240:]}"
