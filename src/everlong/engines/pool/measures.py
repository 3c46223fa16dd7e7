"""What is measured of one engine of a pool: its speed, and how far it is from the trainer. No clock: times are told."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from everlong.contracts.records import EngineMismatch

SPEED_TOKENS = 20_000
"""Answered tokens after which older ones count half: enough for a steady figure, few enough to notice a machine that slows down."""
MIN_PEER_TOKENS = 32
"""Of one age in one batch: with fewer, a peer's mean is chance and is compared with nobody."""


@dataclass(slots=True)
class Speed:
    """Tokens per second of all requests together, over the time in which there were any."""

    _num_tokens: float = 0.0
    _busy_s: float = 0.0
    _since_s: float = 0.0

    def begin(self, at_s: float) -> None:
        """The first request after a pause."""
        self._since_s = at_s

    def count(self, num_tokens: int, at_s: float) -> None:
        """A request was answered."""
        self._num_tokens += num_tokens
        self._busy_s += at_s - self._since_s
        self._since_s = at_s
        if self._num_tokens > SPEED_TOKENS:
            self._num_tokens, self._busy_s = self._num_tokens / 2, self._busy_s / 2

    @property
    def tokens_per_s(self) -> float | None:
        """None until there is one."""
        return self._num_tokens / self._busy_s if self._num_tokens and self._busy_s > 0 else None


@dataclass(slots=True)
class MismatchWindow:
    """The newest measured tokens of an engine: as few whole batches as hold `size` tokens."""

    size: int
    _parts: deque[tuple[int, float]] = field(default_factory=deque)

    def add(self, num_tokens: int, total: float) -> None:
        self._parts.append((num_tokens, total))
        while self.num_tokens - self._parts[0][0] >= self.size:
            self._parts.popleft()

    @property
    def num_tokens(self) -> int:
        return sum(num_tokens for num_tokens, _ in self._parts)

    @property
    def mean(self) -> float | None:
        """Nats per token; None where nothing was measured."""
        return sum(total for _, total in self._parts) / self.num_tokens if self._parts else None

    @property
    def full(self) -> bool:
        return self.num_tokens >= self.size


def excess(part: EngineMismatch, measured: Sequence[EngineMismatch]) -> float | None:
    """Nats of one engine's tokens of one age beyond what its age explains; None where nobody can say.

    Tokens of the version that is trained must agree with it. Older ones differ also because the policy moved on, by as much
    whoever sampled them: they are held against the best other engine's of the same age in the same batch.
    """
    if part.age == 0:
        return part.total
    peers = [
        peer.total / peer.num_tokens
        for peer in measured
        if peer.age == part.age and peer.engine != part.engine and peer.num_tokens >= MIN_PEER_TOKENS
    ]
    return max(0.0, part.total - part.num_tokens * min(peers)) if peers else None
