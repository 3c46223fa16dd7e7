"""Runs of a campaign or study that is gone on with are evidence for the code that made them, and for no other."""

import pytest
from tests import evidence


@pytest.fixture
def room(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("a = 1\n")
    (tmp_path / "study.py").write_text("s = 1\n")
    return tmp_path


def test_a_work_folder_is_gone_on_with_by_the_same_code(room):
    for _ in range(2):
        evidence.keep_to_one_code(room / "work", ("src", "study.py"))
        (room / "work/run").touch()


@pytest.mark.parametrize("changed", ["src/a.py", "src/b.py", "study.py"])
def test_a_work_folder_of_other_code_is_refused(room, changed):
    evidence.keep_to_one_code(room / "work", ("src", "study.py"))
    (room / changed).write_text("changed = 1\n")
    with pytest.raises(SystemExit, match=r"holds runs of other code below src, study.py"):
        evidence.keep_to_one_code(room / "work", ("src", "study.py"))


def test_runs_of_nobody_knows_which_code_are_refused(room):
    (room / "work").mkdir()
    (room / "work/run").touch()
    with pytest.raises(SystemExit, match="nothing says by which code"):
        evidence.keep_to_one_code(room / "work", ("src",))
