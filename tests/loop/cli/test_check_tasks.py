"""`everlong tasks check` with real sandboxes: a line per problem, and nothing else where all is well."""

from pathlib import Path

import pytest

from everlong.cli.tasks import check_command
from everlong.environments.tasks.terminal.generate import make_terminal


def test_proven_tasks_are_one_line_in_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_terminal(tmp_path / "tasks", 3, kinds=("write-word",))
    check_command([tmp_path / "tasks"], 1, "auto", None)
    assert capsys.readouterr().out == "3 of 3 tasks are proven: oracle 1 and empty run 0, once each\n"


def test_every_problem_is_one_line_however_much_was_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, broken, unread = make_terminal(tmp_path / "tasks", 3, kinds=("write-word",))
    (broken / "solution" / "solve.sh").write_text("for i in {1..500}; do echo [line $i]; done; exit 1\n")
    (unread / "task.toml").write_text("workdir = [\n")
    with pytest.raises(SystemExit) as stopped:
        check_command([tmp_path / "tasks"], 1, "auto", None)
    assert stopped.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and max(map(len, lines)) < 500
    assert lines[0].startswith(f"{unread}: ") and "task.toml" in lines[0]
    assert (
        lines[1].startswith("terminal/write-word/")
        and "solve.sh ended with exit code 1" in lines[1]
        and "[line 500]" in lines[1]
    )
    assert lines[2] == "1 of 3 tasks are proven: oracle 1 and empty run 0, once each"
