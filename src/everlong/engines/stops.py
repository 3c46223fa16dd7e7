"""When a turn ends: at a stop id, or once its text holds a stop string, also one that spans tokens.

Nothing is appended and nothing is cut: the sampled ids stay what was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

from everlong.contracts.records import SamplingParams


class StopWatch:
    """Follows the tokens of one turn. `token_bytes` are the bytes that each id stands for."""

    def __init__(self, params: SamplingParams, token_bytes: Sequence[bytes]) -> None:
        self._ids = frozenset(params.stop_ids)
        self._strings = [(text.encode(), text) for text in params.stop_strings]
        self._token_bytes = token_bytes
        self._memory = max((len(raw) for raw, _ in self._strings), default=1) - 1
        self._tail = b""

    def match(self, token: int) -> int | str | None:
        """The stop id or string that `token` completes: an id first, then the string that ends first in the text."""
        if token in self._ids:
            return token
        if not self._strings:
            return None
        text = self._tail + self._token_bytes[token]
        # a string that lay wholly in the tail would have matched before, so every match ends in the new token
        ends = [(text.find(raw) + len(raw), said) for raw, said in self._strings if raw in text]
        if ends:
            return min(ends, key=lambda end: end[0])[1]
        self._tail = text[-self._memory :] if self._memory else b""
        return None
