"""The turns of one episode, each stored once, as the gateway adds them.

A prompt is matched by token ids, never by text: it continues the longest stored path of which every token is a prefix
of it. Where it deviates inside a stored turn (a history that was encoded again, thinking that a template dropped) it
forks: what was sampled stays as it was sampled, and the deviating history becomes context.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from everlong.contracts.decisions import Decisions
from everlong.contracts.records import FinishReason, Turn
from everlong.contracts.tokens import TokenColumns

ROLES = ("main", "summary", "sub_agent", "sub_agent_summary")
"""What a turn can be, in the order in which admission prefers them."""


class EpisodeTree:
    """Built turn by turn, or from the stored turns of an episode."""

    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        self._turns: list[Turn] = []
        self._own_ids: list[np.ndarray] = []
        self._ends: list[int] = []
        self._children: dict[int, list[int]] = {-1: []}
        self.num_forks = 0
        """Prompts added to this tree that deviated inside a stored turn."""
        for turn in turns:
            self._store(turn)

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns)

    def add(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        sampled: TokenColumns,
        finish_reason: FinishReason,
        request_id: str = "",
        *,
        role: str = "main",
        continues: int = -1,
        malformed: bool = False,
        decisions: Decisions | None = None,
    ) -> Turn:
        """Store one model call: `prompt_ids` int[P] are what the engine saw, `sampled` is what it answered.

        `decisions` are of the prompt's tokens that the tree does not know yet (`num_known`); None where none are recorded.
        `continues` names the turn whose work goes on across a compaction; a fork fills it in by itself. A prompt of
        another role that shares only an opening with a stored turn (a sub-agent's first prompt) is no fork.
        Raises ValueError for an empty prompt, an unknown role or turn, and streams that cannot be what was sampled.
        """
        prompt = _token_ids(prompt_ids)
        ends = self._deepest(prompt)
        parent, diverged = max(ends), self._divergence(prompt, ends)
        forks = diverged is not None and continues < 0 and self._turns[diverged].role == role
        turn = Turn(
            index=len(self._turns),
            parent=parent,
            context=TokenColumns.context(prompt[self._end(parent) :], decisions),
            sampled=sampled,
            finish_reason=finish_reason,
            request_id=request_id,
            role=role,
            continues=diverged if diverged is not None and forks else continues,
            malformed=malformed,
        )
        self._store(turn)
        self.num_forks += forks
        return turn

    def num_known(self, prompt_ids: Sequence[int] | np.ndarray) -> int:
        """How many of the prompt's first tokens are those of the stored path that it would continue."""
        return self._end(max(self._deepest(_token_ids(prompt_ids))))

    def path(self, turn: Turn) -> list[int]:
        """Indices of the turns from the root to this one, with it."""
        path = [turn.index]
        while (parent := self._turns[path[-1]].parent) >= 0:
            path.append(parent)
        return path[::-1]

    def columns(self, turn: Turn) -> TokenColumns:
        """Exactly what the engine saw for the turn, then what it answered."""
        turns = [self._turns[index] for index in self.path(turn)]
        return TokenColumns.join([part for step in turns for part in (step.context, step.sampled)])

    def prompt_ids(self, turn: Turn) -> np.ndarray:
        """int32[P]: exactly what the engine saw for the turn."""
        ids = np.concatenate([self._own_ids[index] for index in self.path(turn)])
        return ids[: len(ids) - len(turn.sampled)]

    def departure(self, turn: Turn) -> int | None:
        """Position of the first token that the prompt has otherwise than the turn it continues; None where it continues none."""
        if turn.continues < 0:
            return None
        left = self._turns[turn.continues]
        return common_prefix(self.prompt_ids(turn), self.columns(left).ids)

    def _store(self, turn: Turn) -> None:
        _check_turn(turn, len(self._turns))
        self._turns.append(turn)
        self._own_ids.append(np.concatenate([turn.context.ids, turn.sampled.ids]))
        self._ends.append(self._end(turn.parent) + len(self._own_ids[-1]))
        self._children[turn.parent].append(turn.index)
        self._children[turn.index] = []

    def _end(self, turn: int) -> int:
        """Number of tokens from the root to the end of the turn."""
        return 0 if turn < 0 else self._ends[turn]

    def _deepest(self, prompt: np.ndarray) -> list[int]:
        """The turns that end the longest stored path which is a prefix of the prompt: several where it was sampled again."""
        matching = [-1]
        for turn in matching:
            start = self._end(turn)
            matching += [
                c for c in self._children[turn] if np.array_equal(prompt[start : self._ends[c]], self._own_ids[c])
            ]
        longest = max(map(self._end, matching))
        return [turn for turn in matching if self._end(turn) == longest]

    def _divergence(self, prompt: np.ndarray, ends: Sequence[int]) -> int | None:
        """The stored turn that the prompt leaves half-way."""
        rest = prompt[self._end(ends[0]) :]
        shared = [(common_prefix(rest, self._own_ids[c]), c) for turn in ends for c in self._children[turn]]
        length, child = max(shared, default=(0, -1))
        return None if length in (0, len(rest)) else child


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """How many ids two sequences share from their start."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _check_turn(turn: Turn, index: int) -> None:
    where = f"turn {turn.index}"
    if turn.index != index:
        raise ValueError(
            f"expected turn {index} at place {index}, got {where}: turns are numbered in the order of their calls"
        )
    if not (-1 <= turn.parent < index and -1 <= turn.continues < index):
        raise ValueError(
            f"{where} names parent {turn.parent} and continues {turn.continues}: both must be earlier turns or -1"
        )
    if turn.role not in ROLES:
        raise ValueError(f"{where} has role {turn.role!r}: expected one of {', '.join(ROLES)}")
    if turn.parent < 0 and not len(turn.context):
        raise ValueError(f"{where} begins a path without a prompt: nothing predicts its first token")
    if turn.context.num_sampled or turn.context.num_trainable:
        raise ValueError(
            f"{where} has sampled or trainable tokens in its context: they belong to the turn that sampled them"
        )
    try:
        _check_sampled(turn.sampled)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _check_sampled(columns: TokenColumns) -> None:
    sampled, offsets = columns.sampled, columns.kept.offsets
    if np.any(columns.trainable & ~sampled):
        raise ValueError("tokens that were not sampled are marked trainable")
    if offsets[0] != 0 or offsets[-1] != len(columns.kept.ids) or np.any(np.diff(offsets) < 0):
        raise ValueError(f"kept-set offsets do not cover the {len(columns.kept.ids)} kept ids from 0 in rising order")
    if not np.all(np.isnan(columns.logprobs[~sampled])) or np.any(np.diff(offsets)[~sampled]):
        raise ValueError("tokens that were not sampled have a logprob or a kept set")
    if np.any(columns.versions[sampled] < 0) or not np.all(columns.temperatures[sampled] > 0):
        raise ValueError("sampled tokens need the policy version and the temperature (above 0) that sampled them")
    # The constructor of sampled tokens is the one place that knows what a logprob and a kept set must be.
    logprobs = np.where(sampled, columns.logprobs, np.float32(0))
    TokenColumns.sampled_tokens(columns.ids, logprobs, version=columns.versions, kept=columns.kept)


def _token_ids(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    array = np.asarray(ids)
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
        raise ValueError(f"expected a prompt of one or more token ids, got {array.dtype} of shape {array.shape}")
    return array.astype(np.int32)
