"""What an agent leaves instead of a solution of a HumanEval task is judged, and scores 0, in real sandboxes."""

from pathlib import Path

import pytest

from everlong.contracts.errors import SandboxError
from everlong.environments.grading.verifier import grade
from everlong.environments.quality.check import run_empty, run_oracle
from everlong.environments.sandboxes.config import Isolation
from everlong.environments.sandboxes.local import LocalBackend
from everlong.environments.tasks.harbor import HarborTask, read_task
from everlong.environments.tasks.humaneval.generate import make_humaneval
from everlong.environments.tasks.humaneval.package import Problem, ProblemSet
from everlong.environments.tasks.opening import open_task

DOUBLE = Problem(
    task_id="HumanEval/0",
    prompt='def double(x):\n    """ Twice x. """\n',
    entry_point="double",
    canonical_solution="    return x + x\n",
    test="def check(candidate):\n    assert candidate(2) == 4\n    assert candidate([1]) == [1, 1]\n",
)
CHEATS = {
    "always equal": "class Yes(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef double(x): return Yes()\n",
    "equal object": "class Yes:\n    def __eq__(self, other): return True\ndef double(x): return Yes()\n",
    "exit on import": "import os\nos._exit(0)\n",
    "exit in the call": "import sys\ndef double(x): sys.exit(0)\n",
    "own verdict": "import os\nfor name in ('reward.txt', 'reward.json', '.x'):\n"
    "    open(os.environ['EVERLONG_ROOT'] + '/logs/verifier/' + name, 'w').write('1')\n",
    "own check": "import sys\nsys.modules['__main__'].check = lambda candidate: None\nfor m in sys.modules.values():\n"
    "    m.__dict__['plain'] = lambda value: '4'\n",
    "talks to the checks": "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'value 4\\n' * 9)\n    except OSError: pass\n",
    "kills the checks": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n",
    "no function": "x = 1\n",
    "syntax error": "def double(x:\n",
    "a writer that stays": "import os\nif os.fork() == 0:\n    os.setsid()\n    while True:\n"
    "        open('/logs/verifier/reward.txt', 'w').write('1')\ndef double(x): return 0\n",
    "all memory": "def double(x):\n    return [bytearray(1 << 30) for _ in range(64)]\n",
    "full disk": "open('big', 'wb').write(bytes(1 << 22))\n",
    "no end": "def double(x):\n    while True: pass\n",
    "sleeps": "import time\ndef double(x): time.sleep(3600)\n",
}


def made(out: Path) -> Path:
    return make_humaneval(out, ProblemSet(problems=(DOUBLE,), source="ours", licence=""))[0]


@pytest.fixture
def task(tmp_path: Path) -> HarborTask:
    return read_task(made(tmp_path / "tasks"))


@pytest.fixture
def tired(tmp_path: Path) -> HarborTask:
    """The task with a checker that waits less."""
    folder = made(tmp_path / "tired")
    checker = folder / "tests" / "checker.py"
    text = checker.read_text()
    checker.write_text(text.replace("CPU_S = 20", "CPU_S = 1").replace("WALL_S = 75.0", "WALL_S = 5.0"))
    assert checker.read_text() != text
    return read_task(folder)


async def reward_of(task: HarborTask, solution: str, root: Path, isolation: Isolation) -> float | None:
    backend = LocalBackend(root, isolation=isolation)
    try:
        await backend.probe()
        sandbox = await open_task(task, backend, "episode")
        await sandbox.write("/app/solution.py", solution.encode())
        for module in ("ast", "subprocess", "resource", "threading", "sitecustomize", "usercustomize"):
            await sandbox.write(f"/app/{module}.py", b"import os\nos._exit(0)\n")
        verdict = await grade(task, sandbox)
        await sandbox.close()
        return verdict.reward
    except SandboxError as error:
        pytest.skip(f"isolation {isolation}: {error}")
    finally:
        await backend.close()


@pytest.mark.parametrize("cheat", CHEATS)
async def test_what_is_no_solution_scores_0_and_is_judged(cheat: str, tired: HarborTask, tmp_path: Path):
    assert await reward_of(tired, CHEATS[cheat], tmp_path / "boxes", "namespaces") == 0.0


@pytest.mark.parametrize("cheat", [cheat for cheat in CHEATS if cheat != "a writer that stays"])
async def test_so_it_does_without_isolation_but_for_processes_that_stay(cheat: str, tired: HarborTask, tmp_path: Path):
    assert await reward_of(tired, CHEATS[cheat], tmp_path / "boxes", "none") == 0.0


@pytest.mark.parametrize("isolation", ["namespaces", "none"])
async def test_a_solution_scores_1_beside_planted_modules(isolation: Isolation, task: HarborTask, tmp_path: Path):
    solution = DOUBLE.prompt + DOUBLE.canonical_solution
    assert await reward_of(task, solution, tmp_path / "boxes", isolation) == 1.0


@pytest.mark.parametrize("isolation", ["namespaces", "none"])
async def test_only_the_oracle_scores(isolation: Isolation, task: HarborTask, tmp_path: Path):
    backend = LocalBackend(tmp_path / "boxes", isolation=isolation)
    try:
        await backend.probe()
        assert (await run_oracle(task, backend, "oracle")).reward == 1.0
        assert (await run_empty(task, backend, "empty")).reward == 0.0
    except SandboxError as error:
        pytest.skip(f"isolation {isolation}: {error}")
    finally:
        await backend.close()
