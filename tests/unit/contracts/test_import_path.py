"""Names of code in a config: what is found, and what is said where nothing is."""

import sys
from pathlib import Path

import pytest

from everlong.contracts.import_path import call_named, load_named


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "named_parts.py").write_text("answer = 42\n_hidden = 1\n")
    (tmp_path / "parts_that_lack_one.py").write_text("import a_module_that_nobody_has\n")
    (tmp_path / "parts_that_leave.py").write_text("import sys\nsys.exit(0)\n")
    yield tmp_path
    for name in ("named_parts", "parts_that_lack_one", "parts_that_leave"):
        sys.modules.pop(name, None)


def test_a_name_is_found_in_the_folder_we_were_started_from(here: Path):
    assert load_named("named_parts:answer") == 42
    assert load_named("json.decoder:JSONDecoder").__name__ == "JSONDecoder"


@pytest.mark.parametrize("path", ["named_parts", "named_parts:", ":answer", ""])
def test_a_path_of_another_form_is_refused(here: Path, path: str):
    with pytest.raises(ValueError, match="expected a path of the form package.module:name, got"):
        load_named(path)


def test_what_is_not_there_is_said_with_where_it_was_looked_for(here: Path):
    with pytest.raises(ValueError, match=f"there is no module parts_of_nobody .* in {here}: install it, or start from"):
        load_named("parts_of_nobody:x")
    with pytest.raises(ValueError, match="there is no module json.nothing"):
        load_named("json.nothing:x")
    with pytest.raises(ValueError, match="module named_parts has no anwser; it has answer"):
        load_named("named_parts:anwser")


def test_a_module_that_misses_one_of_its_own_says_so_itself(here: Path):
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        load_named("parts_that_lack_one:x")


def test_code_that_would_end_the_process_is_refused(here: Path):
    with pytest.raises(
        ValueError, match=r"parts_that_leave:x called sys.exit\(0\) where a part of the run was expected"
    ):
        load_named("parts_that_leave:x")
    with pytest.raises(ValueError, match=r"parts:Agent called sys.exit\(3\)"):
        call_named("parts:Agent", sys.exit, 3)
    with pytest.raises(KeyError):
        call_named("parts:Agent", {}.__getitem__, "its own error")
