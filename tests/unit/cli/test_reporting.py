"""What the report of a run says about its config and its episodes."""

import numpy as np

from everlong.cli.config import RunConfig
from everlong.cli.reporting import context_turns, episode_text, summarize
from everlong.contracts.errors import Reason
from everlong.contracts.records import Episode, EpisodeOrder, FinishReason, Purpose, Turn, Verdict
from everlong.contracts.tokens import TokenColumns
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
        ("assistant", "$ mkdir -p a/b"),
        ("tool", "(printed nothing)"),
        ("assistant", "done"),
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
