"""From messages to prompts: what was seen and sampled stays as it is, and only what is new is encoded.

A prompt is the stored ids of the turn that the messages continue, plus a bridge for what is new. Messages that continue
no stored turn are rendered whole; then the tree decides by token ids whether that is a fork.

With `strip_and_branch` the thinking of all answers before a user's message leaves the prompt when that message comes, as
the templates of many reasoning models have it. The ids of the thinking are cut out and those around them stay, so that
nothing is encoded again; the shorter history is a branch of its own, and what was thought trains where it was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from everlong.contracts.records import GenerateReply, Turn
from everlong.rollouts.config import ThinkingHistory
from everlong.rollouts.gateway.history import Continuation, History
from everlong.rollouts.messages import Message
from everlong.rollouts.renderers.chatml import Renderer
from everlong.trajectories.tree import EpisodeTree


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: np.ndarray
    """int32[P]"""
    continued: Continuation
    thoughts: tuple[slice, ...]
    """Earlier thinking that stands in the ids and may be cut out, in rising order."""
    stripped: bool
    """Whether thinking was cut out of the turn that is continued."""


class Conversation:
    def __init__(self, renderer: Renderer, thinking: ThinkingHistory) -> None:
        self._renderer, self._thinking = renderer, thinking
        self.tree = EpisodeTree()
        self._history = History()
        self._thoughts: list[tuple[slice, ...]] = []
        """For each turn, where thinking stands in what the engine saw and answered."""
        self.num_stripped = 0
        """Prompts that began a branch because thinking was cut out."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Prompt:
        """Changes nothing; `add` follows where the prompt was answered and the answer is to stay."""
        continued = self._history.find(messages, tools)
        if continued.turn < 0:
            ids = np.asarray(self._renderer.render(messages, tools), np.int32)
            return Prompt(ids, continued, (), stripped=False)
        stored = self.tree.columns(self.tree.turns[continued.turn]).ids
        thoughts = self._thoughts[continued.turn]
        bridge = np.asarray(self._renderer.bridge(int(stored[-1]), continued.new), np.int32)
        strips = bool(thoughts) and any(message.role == "user" for message in continued.new)
        if strips:
            stored, thoughts = _without(stored, thoughts), ()
        return Prompt(np.concatenate([stored, bridge]), continued, thoughts, strips)

    def add(self, prompt: Prompt, reply: GenerateReply, answer: Message, *, malformed: bool = False) -> Turn:
        # A turn that something else continues already is left by a rewritten history: that is a fork, which the tree finds.
        cut = prompt.stripped and not self._history.is_continued(prompt.continued.turn)
        continues = prompt.continued.turn if cut else -1
        turn = self.tree.add(
            prompt.ids, reply.columns, reply.finish_reason, reply.request_id, continues=continues, malformed=malformed,
            decisions=reply.context,
        )  # fmt: skip
        self._history.add(prompt.continued, answer)
        self._thoughts.append((*prompt.thoughts, *self._thought(len(prompt.ids), reply.columns.ids.tolist())))
        self.num_stripped += prompt.stripped
        return turn

    def _thought(self, num_prompt: int, ids: list[int]) -> tuple[slice, ...]:
        """What of a new turn a later prompt leaves out."""
        if self._thinking == "keep":
            return ()
        thinking = self._renderer.thinking(ids)
        span = slice(num_prompt - thinking.num_opened, num_prompt + thinking.num_sampled)
        return (span,) if thinking.separable and span.start < span.stop else ()


def _without(ids: np.ndarray, spans: Sequence[slice]) -> np.ndarray:
    stays = np.ones(len(ids), bool)
    for span in spans:
        stays[span] = False
    return ids[stays]
