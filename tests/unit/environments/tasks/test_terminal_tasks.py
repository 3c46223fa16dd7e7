import os
import subprocess
from pathlib import Path

import pytest

from everlong.environments.tasks.content_hash import content_hash
from everlong.environments.tasks.harbor import read_task
from everlong.environments.tasks.sources import read_tasks
from everlong.environments.tasks.terminal.draw import WORDS, Draw
from everlong.environments.tasks.terminal.generate import Split, choose_kinds, make_terminal, oracle_commands
from everlong.environments.tasks.terminal.kinds import KINDS
from everlong.environments.tasks.terminal.variant import Kind, Variant, render_verifier

VARIANTS_PER_KIND = 4


def score(variant: Variant, commands: tuple[str, ...], folder: Path) -> float:
    """Play the commands on the variant's files, one shell each, then run its verifier there."""
    workdir, verdict = folder / "app", folder / "logs" / "verifier"
    for path in (workdir, verdict):
        path.mkdir(parents=True)
    for name, data in variant.files.items():
        (workdir / name).parent.mkdir(parents=True, exist_ok=True)
        (workdir / name).write_bytes(data)
    env = {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": str(verdict), "EVERLONG_ROOT": str(folder)}
    for command in (*commands, render_verifier(variant)):
        subprocess.run(["bash", "-c", command], cwd=workdir, env=env, stdin=subprocess.DEVNULL, capture_output=True)
    return float((verdict / "reward.txt").read_text())


def variants(kind: Kind) -> list[Variant]:
    return [kind.make(Draw.named(f"test/{kind.name}/{number}")) for number in range(VARIANTS_PER_KIND)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_only_the_work_scores(kind: Kind, tmp_path: Path):
    mine, *others = variants(kind)
    target = mine.instruction.rstrip(".").split()[-1]
    copied = (mine.instruction, f"echo '{mine.instruction}' > {target}")
    assert score(mine, mine.commands, tmp_path / "oracle") == 1.0
    assert score(mine, (), tmp_path / "empty") == 0.0
    assert score(mine, copied, tmp_path / "instruction") == 0.0
    for number, other in enumerate(others):
        assert score(mine, other.commands, tmp_path / f"blind-{number}") == 0.0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.level == 3], ids=lambda kind: kind.name)
def test_a_kind_that_needs_reading_is_not_solved_by_half_its_turns(kind: Kind, tmp_path: Path):
    variant = variants(kind)[0]
    assert len(variant.commands) >= 2
    assert score(variant, variant.commands[:-1], tmp_path) == 0.0
    answer = variant.commands[-1].split()[1]
    assert answer not in variant.instruction


def test_a_link_to_the_tests_scores_nothing(tmp_path: Path):
    variant = next(kind for kind in KINDS if kind.name == "write-word").make(Draw.named("link"))
    word, name = variant.instruction.removeprefix("Write the word ").rstrip(".").split(" to ")
    (tmp_path / "expected").write_text(word)
    assert score(variant, (f"ln -s {tmp_path}/expected {name}",), tmp_path / "link") == 0.0


def test_names_and_commands_are_short_enough_for_a_small_model():
    for kind in KINDS:
        for variant in variants(kind):
            assert len(variant.instruction) <= 100
            assert all(len(command) <= 60 for command in variant.commands)
            assert all(word.isascii() for word in variant.commands)


def test_no_word_is_part_of_another():
    assert [(a, b) for a in WORDS for b in WORDS if a != b and a in b] == []


def test_there_are_easy_kinds_and_kinds_that_never_train():
    assert sum(kind.level == 1 for kind in KINDS) == 3
    assert len(choose_kinds(Split.TRAIN)) >= 10
    assert len(choose_kinds(Split.HELD_OUT_KINDS)) >= 2
    assert not {kind.name for kind in choose_kinds(Split.TRAIN)} & {k.name for k in choose_kinds(Split.HELD_OUT_KINDS)}


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_terminal(tmp_path / "a", 25, seed=7)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    make_terminal(tmp_path / "b", 25, seed=7)
    make_terminal(tmp_path / "c", 25, seed=8)
    assert content_hash(tmp_path / "a") == content_hash(tmp_path / "b")
    assert content_hash(tmp_path / "a") != content_hash(tmp_path / "c")


def test_a_seed_means_the_same_bytes_on_every_machine_and_python(tmp_path: Path):
    make_terminal(tmp_path / "t", 2 * len(choose_kinds(Split.TRAIN)), seed=0)
    make_terminal(tmp_path / "k", 2 * len(choose_kinds(Split.HELD_OUT_KINDS)), seed=0, split="held-out-kinds")
    assert (content_hash(tmp_path / "t"), content_hash(tmp_path / "k")) == (
        "08d2198c8d6aee21b631e4f04f657534",
        "4a9c420b855132f97a4b015e0b9e665d",
    )


def test_more_tasks_of_a_seed_start_with_the_same_tasks(tmp_path: Path):
    few = make_terminal(tmp_path / "few", 20, seed=1)
    many = make_terminal(tmp_path / "many", 40, seed=1)
    assert [path.name for path in few] == [path.name for path in many[:20]]


def test_no_seed_puts_an_instruction_into_both_splits(tmp_path: Path):
    train, held_out = set(), set()
    for seed in range(3):
        train |= {t.task.instruction for t in read_tasks(_made(tmp_path / f"t{seed}", seed, Split.TRAIN))}
        held_out |= {t.task.instruction for t in read_tasks(_made(tmp_path / f"e{seed}", seed, Split.EVAL))}
    assert len(train) > 100 and len(held_out) > 100
    assert not train & held_out


def _made(out: Path, seed: int, split: Split) -> list[Path]:
    return make_terminal(out, 54, seed=seed, split=split)


def test_every_generated_folder_is_a_valid_task_with_its_oracle(tmp_path: Path):
    make_terminal(tmp_path / "tasks", 2 * len(choose_kinds(Split.TRAIN)))
    tasks = read_tasks([tmp_path / "tasks"])
    assert len(tasks) == 2 * len(choose_kinds(Split.TRAIN))
    for task in tasks:
        prefix, kind, number = task.id.split("/")
        assert (prefix, kind) == ("terminal", task.task.kind) and number.isdigit()
        assert task.ignored_keys == () and task.task.network is False
        solution = Path(task.solution or "", "solve.sh").read_text()
        assert solution == "\n".join(["#!/bin/bash", *oracle_commands(task)]) + "\n"
        assert not any(Path(copy.source).is_relative_to(task.tests) for copy in task.copies)


def test_bad_requests_are_refused_with_what_is_there(tmp_path: Path):
    with pytest.raises(ValueError, match=r"split train has no kind 'join-files': it has write-word, "):
        make_terminal(tmp_path / "a", 1, kinds=("join-files",))
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        make_terminal(tmp_path / "a", 0)
    with pytest.raises(ValueError, match="'test' is not a valid Split"):
        make_terminal(tmp_path / "a", 1, split="test")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(FileExistsError, match="is not empty: name a new folder"):
        make_terminal(tmp_path / "full", 1)


def test_a_task_that_was_not_generated_has_no_oracle_turns(tmp_path: Path):
    folder = make_terminal(tmp_path / "made", 1)[0]
    toml = folder / "task.toml"
    toml.write_text(toml.read_text().replace('id = "terminal/', 'id = "other/'))
    with pytest.raises(ValueError, match="has no oracle of one command per line"):
        oracle_commands(read_task(folder))
