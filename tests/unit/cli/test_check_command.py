"""`everlong tasks check` on folders that cannot even be read; proofs in sandboxes are in the loop tier."""

from pathlib import Path

import pytest

from everlong.cli.tasks import check_command
from everlong.environments.tasks.terminal.generate import make_terminal


def test_every_folder_that_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, three = make_terminal(tmp_path / "tasks", 3, kinds=("write-word",))
    (one / "task.toml").write_text("workdir = [\n")
    (two / "tests" / "test.sh").unlink()
    (three / "instruction.md").write_text("")
    with pytest.raises(SystemExit) as stopped:
        check_command([tmp_path / "tasks"], 1, "auto", None)
    assert stopped.value.code == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [str(one), str(two), str(three)]
    assert "tests/test.sh" in lines[1] and "is empty" in lines[2]
    assert last.startswith("0 of 3 tasks are proven")
