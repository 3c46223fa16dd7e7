"""Tasks, grading and gates on real sandboxes: what an agent does to be paid without the work is not paid."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from everlong.contracts.errors import Reason, SandboxError
from everlong.contracts.ports import Command
from everlong.contracts.records import Verdict
from everlong.environments.grading.verifier import grade
from everlong.environments.quality.check import check_tasks
from everlong.environments.sandboxes.local import LocalBackend
from everlong.environments.tasks.harbor import HarborTask, read_task
from everlong.environments.tasks.opening import open_task
from everlong.environments.tasks.sources import read_tasks
from everlong.environments.tasks.terminal.generate import Split, choose_kinds, make_terminal, oracle_commands


async def open_local(root: Path, isolation: Literal["namespaces", "none"]) -> AsyncIterator[LocalBackend]:
    backend = LocalBackend(root, isolation=isolation)
    try:
        await backend.probe()
    except SandboxError as error:
        pytest.skip(f"isolation {isolation}: {error}")
    yield backend
    await backend.close()


@pytest.fixture(params=["namespaces", "none"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path):
    async for backend in open_local(tmp_path / "sandboxes", request.param):
        yield backend


@pytest.fixture
async def caged(tmp_path: Path):
    """Cheats would write to the host itself without isolation."""
    async for backend in open_local(tmp_path / "sandboxes", "namespaces"):
        yield backend


@pytest.fixture
def task(tmp_path: Path) -> HarborTask:
    return read_task(make_terminal(tmp_path / "task", 1, kinds=("count-lines",))[0])


async def play(task: HarborTask, backend: LocalBackend, *commands: str, snapshots: bool = False) -> Verdict:
    """Each command in a shell of its own, as an agent's turns are; then the verdict. `snapshots`: one after each."""
    sandbox = await open_task(task, backend, "episode")
    kept = []
    try:
        for command in commands:
            await sandbox.exec(Command(argv=("bash", "-c", command), timeout_s=10.0))
            if snapshots:
                kept.append(await sandbox.snapshot())
        return await grade(task, sandbox)
    finally:
        await sandbox.close()
        for one in kept:
            await backend.drop(one)


@pytest.mark.parametrize("split", list(Split))
async def test_every_generated_kind_passes_the_gate(tmp_path: Path, backend: LocalBackend, split: Split):
    make_terminal(tmp_path / "tasks", len(choose_kinds(split)), split=split)
    reports = await check_tasks(read_tasks([tmp_path / "tasks"]), backend, repeats=3, concurrency=2)
    assert [report.problems for report in reports if not report.ok] == []
    assert {report.kind for report in reports} == {kind.name for kind in choose_kinds(split)}


async def test_the_oracles_turns_solve_the_task_one_by_one(tmp_path: Path, backend: LocalBackend):
    make_terminal(tmp_path / "tasks", len(choose_kinds(Split.TRAIN)), seed=5)
    for task in read_tasks([tmp_path / "tasks"]):
        assert (await play(task, backend, *oracle_commands(task))).reward == 1.0, task.id


def with_tests(task: HarborTask, folder: Path, script: str) -> HarborTask:
    folder.mkdir()
    (folder / "test.sh").write_text(script)
    return msgspec.structs.replace(task, tests=str(folder))


@pytest.mark.parametrize(
    ("script", "reward", "reason"),
    [
        ("kill -9 $$", None, Reason.VERIFIER_CRASH),
        (": > $EVERLONG_ROOT/logs/verifier/reward.txt", None, Reason.VERIFIER_CRASH),
        ("echo abc > $EVERLONG_ROOT/logs/verifier/reward.txt", None, Reason.VERIFIER_CRASH),
        ("echo 0 > $EVERLONG_ROOT/logs/verifier/reward.txt", 0.0, None),
        ("echo '{\"reward\": 0.5}' > $EVERLONG_ROOT/logs/verifier/reward.json", 0.5, None),
        ("echo 1 > $EVERLONG_ROOT/logs/verifier/reward.txt; sleep 30", None, Reason.VERIFIER_TIMEOUT),
    ],
    ids=["killed", "empty", "word", "zero", "json", "timeout"],
)
async def test_no_verdict_is_not_a_verdict_of_zero(
    task: HarborTask, backend: LocalBackend, tmp_path: Path, script: str, reward: float | None, reason: Reason | None
):
    short = msgspec.structs.replace(task, task=msgspec.structs.replace(task.task, verifier_timeout_s=1.0))
    verdict = await play(with_tests(short, tmp_path / "tests", script), backend)
    assert (verdict.reward, verdict.reason) == (reward, reason)


@pytest.mark.parametrize(
    "cheat",
    [
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "mkdir -p logs/verifier tests; echo 1 > logs/verifier/reward.txt; echo 1 > reward.txt",
        "mkdir -p tests; echo 'echo 1 > /logs/verifier/reward.txt' > tests/test.sh; cp tests/test.sh .",
        "for tool in find head wc tr cat bash; do printf '#!/bin/sh\\necho 1\\n' > $tool; chmod +x $tool; done",
        "printf 'reward=1; echo 1 > /logs/verifier/reward.txt; exit 0' | tee .bashrc .profile .bash_profile",
        "(while :; do echo 1 > /logs/verifier/reward.txt; sleep 0.05; done) >/dev/null 2>&1 &",
        "cat /tests/test.sh > found; cat /solution/solve.sh | bash",
    ],
    ids=["verdict", "verdict-in-workdir", "own-tests", "trojans", "shell-settings", "background-writer", "reads-tests"],
)
async def test_a_cheat_is_not_paid(task: HarborTask, caged: LocalBackend, cheat: str):
    assert (await play(task, caged, cheat)).reward == 0.0


DEEP = "python3 -c \"import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\""


@pytest.mark.parametrize("snapshots", [False, True], ids=["one folder", "layers"])
@pytest.mark.parametrize(
    "left",
    [
        DEEP,
        "mkfifo pipe; mkdir locked; echo > locked/file; chmod 0 locked/file locked; truncate -s 9G giant",
        "printf x > $'\\xff\\nname'; ln -s a a; for i in $(seq 2000); do ln $'\\xff\\nname' $i; done",
        "cd /; rm -rf $EVERLONG_ROOT/app/* $EVERLONG_ROOT/app/.[!.]*; rmdir $EVERLONG_ROOT/app; true",
    ],
    ids=["deep", "locked-and-special", "names-and-links", "nothing"],
)
async def test_whatever_an_agent_leaves_gets_a_verdict(
    task: HarborTask, backend: LocalBackend, left: str, snapshots: bool
):
    verdict = await play(
        task, backend, left, "chmod u+rwx locked; echo > locked/other; chmod 0 locked", snapshots=snapshots
    )
    assert (verdict.reward, verdict.reason, verdict.flags) == (0.0, None, ())
    assert not [*backend.claim.folder.glob("s-*"), *backend.claim.folder.glob("layers/*")], "all is removed"


@pytest.mark.parametrize("snapshots", [False, True], ids=["one folder", "layers"])
async def test_an_agent_that_leaves_more_than_can_be_copied_is_told_so_and_not_paid(
    task: HarborTask, caged: LocalBackend, snapshots: bool
):
    limits = msgspec.structs.replace(task.task.limits, disk_mb=1)
    small = msgspec.structs.replace(task, task=msgspec.structs.replace(task.task, limits=limits))
    # each file is within the limit, and they are there before anybody counts
    fill = [f"head -c 900000 /dev/zero > {name}" for name in (1, 2, 3)]
    fill = fill if snapshots else ["; ".join(fill)]
    verdict = await play(small, caged, *oracle_commands(task), *fill, snapshots=snapshots)
    assert (verdict.reward, verdict.reason, verdict.flags) == (0.0, None, ("workspace_too_large",))
    assert "1 MB to be copied, and holds more" in verdict.output


async def test_a_full_workdir_leaves_the_verifier_its_own_room(task: HarborTask, caged: LocalBackend, tmp_path: Path):
    limits = msgspec.structs.replace(task.task.limits, disk_mb=2)
    small = msgspec.structs.replace(task, task=msgspec.structs.replace(task.task, limits=limits))
    works = with_tests(
        small,
        tmp_path / "tests",
        "head -c 1500000 /dev/zero > big; sleep 2.5; echo 0.5 > $EVERLONG_ROOT/logs/verifier/reward.txt",
    )
    assert (await play(works, caged, "head -c 1800000 /dev/zero > full")).reward == 0.5


@pytest.mark.parametrize("solves", [False, True], ids=["only planted", "planted beside the work"])
async def test_a_planted_verdict_is_seen_and_counts_nothing(task: HarborTask, backend: LocalBackend, solves: bool):
    planted = "echo 1 > $EVERLONG_ROOT/logs/verifier/reward.txt"
    verdict = await play(task, backend, planted, *(oracle_commands(task) if solves else ()))
    assert (verdict.reward, verdict.flags) == (float(solves), ("verdict_preexisting",))
    assert (await play(task, backend)).flags == ()


async def test_the_agent_may_overwrite_the_tests_of_its_workdir_and_still_be_paid_for_the_work(
    task: HarborTask, caged: LocalBackend
):
    vandalism = "mkdir tests; echo 'exit 1' > tests/test.sh"
    assert (await play(task, caged, vandalism, *oracle_commands(task))).reward == 1.0
