"""What the pages name exists: tests, settings, files and links."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from everlong.cli.config import RunConfig
from everlong.cli.mistakes import variants
from everlong.contracts.errors import Reason
from everlong.ledger import EpisodeState
from everlong.trainer.config import GrpoConfig

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


def code_of(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))


def settings_of(kind: type[BaseModel], prefix: str = "") -> set[str]:
    found = set()
    for name, field in kind.model_fields.items():
        kinds = [k for k in (field.annotation, *getattr(field.annotation, "__args__", ())) if isinstance(k, type)]
        found.add(prefix + name)
        for child in kinds:
            if issubclass(child, BaseModel):
                found |= settings_of(child, f"{prefix}{name}.")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page: Path):
    there = {name for path in ROOT.glob("tests/**/*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert [word for word in code_of(page) if re.fullmatch(r"test_\w+", word) and word not in there] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_that_a_page_names_exists(page: Path):
    known = settings_of(RunConfig)
    tables = "|".join(sorted({name.partition(".")[0] for name in known if "." in name}))
    named = {word for text in code_of(page) for word in re.findall(rf"^((?:{tables})\.[a-z_.]+)(?: =.*)?$", text)}
    files = {name for name in named if name.endswith(".safetensors") or (ROOT / "src/everlong" / name).exists()}
    assert named - known - files == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file(page: Path):
    links = re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_of_ours_that_a_page_names_exists(page: Path):
    names = [word for word in code_of(page) if re.fullmatch(r"(?:src|docs|tests|scripts)/[\w./-]+", word)]
    names += [f"src/everlong/{w}" for w in code_of(page) if re.fullmatch(r"(?:\w+/)+\w+\.py", w) and "tests" not in w]
    anothers = ("tests/test.sh", "docs/evidence/NAME.json")  # of a task folder; of a bench not yet run
    assert [name for name in names if name not in anothers and not (ROOT / name).exists()] == []


def test_the_ledgers_page_names_every_terminal_state():
    page = (ROOT / "docs/ledger.md").read_text()
    assert [state for state in EpisodeState if f"*{state}*" not in page and state.terminal] == []


def test_the_tasks_page_names_every_failure_that_grading_can_give():
    page = (ROOT / "docs/tasks.md").read_text()
    graded = (Reason.VERIFIER_CRASH, Reason.VERIFIER_TIMEOUT, Reason.SANDBOX_CRASH, Reason.NOTHING_SAMPLED)
    assert [reason for reason in graded if f"`{reason}`" not in page] == []


def test_the_settings_of_a_union_are_among_the_known_ones():
    assert {f"loss.{name}" for name in GrpoConfig.model_fields} <= settings_of(RunConfig)


def test_the_readme_links_every_page():
    linked = re.findall(r"\]\((docs/[\w-]+\.md)\)", (ROOT / "README.md").read_text())
    pages = [str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/*.md"))]
    assert [page for page in pages if page not in linked] == []


def settled() -> list[str]:
    """What the first column of the table in docs/config.md names, and behind "top level" the second."""
    page = (ROOT / "docs/config.md").read_text().partition("| table | what it settles |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| ")]
    return [word for first, second in rows for word in re.findall(r"`(\w+)`", second if "top" in first else first)]


def test_the_table_of_settings_is_that_of_the_config():
    assert sorted(settled()) == sorted(RunConfig.model_fields)


def types_of(kind: type[BaseModel], path: str = "") -> set[tuple[str, str]]:
    """Every table that comes in types, with each of them."""
    found = set()
    for name, field in kind.model_fields.items():
        for child in variants(field.annotation):
            if "type" in child.model_fields:
                found.add((path + name, child.model_fields["type"].default))
            found |= types_of(child, f"{path}{name}.")
    return found


def test_some_page_names_every_type_that_a_table_comes_in():
    pages = " ".join(text for page in ROOT.glob("docs/*.md") for text in code_of(page))
    names = set(re.findall(r"[\w-]+", pages))
    assert [(table, kind) for table, kind in sorted(types_of(RunConfig)) if kind not in names] == []


def test_the_page_of_settings_names_every_model_and_no_other():
    page = (ROOT / "docs/config.md").read_text()
    (row,) = [line.split("|")[2] for line in page.splitlines() if line.startswith("| `model` ")]
    assert set(re.findall(r"`([\w-]+)`", row)) == {kind for table, kind in types_of(RunConfig) if table == "model"}
