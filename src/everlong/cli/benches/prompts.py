"""Prompts of a given length out of a text that everyone has: this package's own source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import everlong
from everlong.rollouts.renderers.tokenizers import Tokenizer


class Windows:
    """Hands out windows of the text, none twice, so that no engine has seen one before."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._ids = tokenizer, self._tokens(tokenizer)

    def take(self, num_tokens: int) -> list[int]:
        """Ids whose text is encoded as these same ids, so that a peer may be given either. ValueError at the text's end."""
        while True:
            ids = [token for token, _ in zip(self._ids, range(num_tokens), strict=False)]
            if len(ids) < num_tokens:
                raise ValueError("the bench asks for more text than the package has: ask for fewer or shorter prompts")
            if self._tokenizer.encode(self._tokenizer.decode(ids)) == ids:
                return ids

    @staticmethod
    def _tokens(tokenizer: Tokenizer) -> Iterator[int]:
        for file in sorted(Path(everlong.__file__).parent.rglob("*.py")):
            yield from tokenizer.encode(file.read_text())
