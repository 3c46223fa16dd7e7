"""What the report of a run says about its config and its episodes."""

import msgspec
import numpy as np

from everlong.cli.config import RunConfig
from everlong.cli.reporting import context_turns, episode_text, summarize
from everlong.contracts.errors import Reason
from everlong.contracts.records import Episode, EpisodeOrder, FinishReason, Purpose, Turn, Verdict
from everlong.contracts.tokens import TokenColumns
from everlong.ledger import EpisodeState, EpisodeView
from everlong.rollouts.messages import Message
from everlong.rollouts.renderers.chatml import ChatML
from everlong.rollouts.renderers.tokenizers import ByteTokenizer

CHATML = ChatML(ByteTokenizer())


def turn(context: list[int], said: str, parent: int) -> Turn:
    ids = [*CHATML.tokenizer.encode(said), *CHATML.stop_ids]
    sampled = TokenColumns.sampled_tokens(ids, np.zeros(len(ids), np.float32), version=7)
    return Turn(
        index=parent + 1,
        parent=parent,
        finish_reason=FinishReason.STOP,
        context=TokenColumns.context(context),
        sampled=sampled,
    )


def test_episode_reads_as_roles_without_special_tokens() -> None:
    end = CHATML.stop_ids[0]
    first = turn(CHATML.render([Message(role="user", content="Make the folder a/b.\nNow.")]), "$ mkdir -p a/b", -1)
    second = turn(CHATML.bridge(end, [Message(role="tool", content="")]), "done", 0)
    order = EpisodeOrder(task="terminal/make-folder/17", group=4, attempt=2, purpose=Purpose.TRAIN)
    text = episode_text(
        Episode(order=order, reason=Reason.DONE, verdict=Verdict(reward=1.0), turns=(first, second)), CHATML.tokenizer
    )
    assert [(piece.role, piece.text) for piece in text.turns] == [
        ("user", "Make the folder a/b.\nNow."),
        ("assistant, turn 0", "$ mkdir -p a/b"),
        ("tool", "(printed nothing)"),
        ("assistant, turn 1", "done"),
    ]
    assert text.title == "make-folder, policy version 7, train-000004-002, ended: done"
    assert (text.outcome, text.succeeded) == ("reward 1", True)


def test_episode_without_verdict_is_no_failure() -> None:
    order = EpisodeOrder(task="terminal/make-folder/17", group=0, attempt=0, purpose=Purpose.TRAIN)
    verdict = Verdict(reward=None, reason=Reason.SANDBOX_CRASH)
    text = episode_text(Episode(order=order, reason=Reason.SANDBOX_CRASH, verdict=verdict), CHATML.tokenizer)
    assert (text.outcome, text.succeeded, text.turns) == ("no verdict", None, ())


def test_context_that_closes_a_cut_answer_adds_only_its_messages() -> None:
    bridge = CHATML.bridge(ord("x"), [Message(role="tool", content="[exit 1]")])
    assert [(piece.role, piece.text) for piece in context_turns(bridge, CHATML.tokenizer)] == [("tool", "[exit 1]")]


def test_summary_names_the_rate_that_each_phase_learns_at() -> None:
    config = RunConfig.model_validate(
        {"warmup": {"num_batches": 5}, "optimizer": {"learning_rate": 1e-3, "supervised_learning_rate": 2e-3}}
    )
    summary = summarize(config, [])
    assert "learning rate 0.002" in summary["warm-up"] and "learning rate 0.001" in summary["RL"]
    assert "warm-up" not in summarize(RunConfig(), [])


def test_a_fork_says_what_it_goes_on_from() -> None:
    asked = CHATML.render([Message(role="user", content="Go.")])
    turns = [turn(asked, "a", -1), turn(asked, "b", 0), turn(asked, "c", 0), turn(asked, "d", -1)]
    turns = [msgspec.structs.replace(each, index=index) for index, each in enumerate(turns)]
    shown = episode_text(episode_of(turns), CHATML.tokenizer).turns
    assert [(piece.fork, piece.text) for piece in shown if piece.fork] == [
        ("goes on from turn 0", "Go."),
        ("begins anew", "Go."),
    ]


def test_an_episode_of_a_thousand_long_turns_keeps_the_page_small() -> None:
    long = CHATML.render([Message(role="user", content="x" * 10_000)])
    turns = [turn(long if index else CHATML.render([Message(role="user", content="Go.")]), "y" * 10_000, index - 1) for index in range(1000)]  # fmt: skip
    shown = episode_text(episode_of(turns), CHATML.tokenizer).turns
    assert sum(len(piece.text) for piece in shown) < 40 * 2 * 4100
    assert [piece.fork for piece in shown if piece.fork] == ["960 turns are left out: `everlong view` shows them"]
    assert shown[-1].role == "assistant, turn 999" and "characters cut" in shown[-1].text


def test_thousands_of_kinds_are_counted_and_not_listed() -> None:
    views = [EpisodeView(episode=f"train-{n:06d}-000", task=f"task-{n}", group=n, attempt=0, purpose=Purpose.TRAIN, incarnation=0, state=EpisodeState.TRAINED) for n in range(3000)]  # fmt: skip
    tasks = summarize(RunConfig(), views)["tasks"]
    assert tasks.startswith("trained: 3000 tasks (task-0 1") and "2976 more kinds" in tasks and len(tasks) < 600


def episode_of(turns: list[Turn]) -> Episode:
    order = EpisodeOrder(task="terminal/make-folder/17", group=4, attempt=2, purpose=Purpose.TRAIN)
    return Episode(order=order, reason=Reason.DONE, verdict=Verdict(reward=1.0), turns=tuple(turns))
