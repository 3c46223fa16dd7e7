"""The turns of one episode, each stored once, as the gateway adds them.

A prompt is matched by token ids, never by text: it continues the longest stored path of which every token is a prefix
of it. Where it deviates inside a stored turn (a history that was encoded again, thinking that a template dropped) it
forks: what was sampled stays as it was sampled, and the deviating history becomes context.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from everlong.contracts.records import Episode, FinishReason, Turn
from everlong.contracts.tokens import TokenColumns

ROLES = ("main", "summary", "sub_agent", "sub_agent_summary")
"""What a turn can be, in the order in which admission prefers them."""


@dataclass(frozen=True, slots=True)
class _Divergence:
    turn: int
    """The stored turn that the prompt leaves half-way."""
    position: int
    """Of the first token of the prompt that differs."""


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
        num_reported: int | None = None,
    ) -> Turn:
        """Store one model call: `prompt_ids` int[P] are what the engine saw, `sampled` is what it answered.

        `continues` names the turn whose work goes on across a compaction; a fork fills it in by itself. A prompt of
        another role that shares only an opening with a stored turn (a sub-agent's first prompt) is no fork.
        `num_reported` is the number of sampled tokens that the engine says it made, where it says so.
        Raises ValueError for an empty prompt, an unknown role or turn, and streams that cannot be what was sampled.
        """
        prompt = _token_ids(prompt_ids)
        if num_reported is not None and num_reported != sampled.num_sampled:
            raise ValueError(
                f"the engine reported {num_reported} sampled tokens but gave {sampled.num_sampled} ids: some were lost "
                "on the way, discard the turn"
            )
        parent = self._deepest(prompt)
        diverged = self._divergence(prompt, parent)
        forks = diverged is not None and continues < 0 and self._turns[diverged.turn].role == role
        turn = Turn(
            index=len(self._turns),
            parent=parent,
            context=TokenColumns.context(prompt[self._end(parent) :]),
            sampled=sampled,
            finish_reason=finish_reason,
            request_id=request_id,
            role=role,
            continues=diverged.turn if diverged is not None and forks else continues,
        )
        self._store(turn)
        self.num_forks += forks
        return turn

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

    def drift(self, prompt_ids: Sequence[int] | np.ndarray) -> int | None:
        """The first position at which the prompt deviates inside a stored turn with which it begins to agree.

        None where it extends a stored path, ends inside one, or shares no token with any.
        """
        prompt = _token_ids(prompt_ids)
        diverged = self._divergence(prompt, self._deepest(prompt))
        return None if diverged is None else diverged.position

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

    def _deepest(self, prompt: np.ndarray) -> int:
        """The turn that ends the longest stored path which is a prefix of the prompt; of equal ones the latest."""
        deepest, stack = -1, [-1]
        while stack:
            turn = stack.pop()
            deepest = max(deepest, turn, key=lambda t: (self._end(t), t))
            start = self._end(turn)
            stack += [
                c for c in self._children[turn] if np.array_equal(prompt[start : self._ends[c]], self._own_ids[c])
            ]
        return deepest

    def _divergence(self, prompt: np.ndarray, parent: int) -> _Divergence | None:
        rest = prompt[self._end(parent) :]
        shared = [(common_prefix(rest, self._own_ids[child]), child) for child in self._children[parent]]
        length, child = max(shared, default=(0, -1))
        if length in (0, len(rest)):
            return None
        return _Divergence(turn=child, position=self._end(parent) + length)


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """How many ids two sequences share from their start."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def check_episode(episode: Episode, vocab_size: int | None = None) -> None:
    """Raises ValueError for an episode that cannot be what an engine saw and sampled; who asks decides what becomes of it.

    `vocab_size` is the tokenizer's: rows that only pad the model's head have no token behind them.
    """
    if episode.num_discarded < 0:
        raise ValueError(f"{episode.id}: expected 0 or more discarded tokens, got {episode.num_discarded}")
    for index, turn in enumerate(episode.turns):
        try:
            _check_turn(turn, index)
            if vocab_size is not None:
                _check_vocabulary(turn, vocab_size)
        except ValueError as error:
            raise ValueError(f"{episode.id}: {error}") from error


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


def _check_vocabulary(turn: Turn, vocab_size: int) -> None:
    for ids in (turn.context.ids, turn.sampled.ids, turn.sampled.kept.ids):
        if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
            wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
            raise ValueError(f"turn {turn.index} holds id {wrong}, the vocabulary has ids 0 to {vocab_size - 1}")


def _token_ids(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    array = np.asarray(ids)
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
        raise ValueError(f"expected a prompt of one or more token ids, got {array.dtype} of shape {array.shape}")
    return array.astype(np.int32)
