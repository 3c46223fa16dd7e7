"""The tokenizer port and its two implementations: bytes for the toy, `tokenizer.json` for everything else.

Text is always encoded as text: a user who writes the name of a special token gets its letters, never its id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int:
        """Ids from here on name no token."""
        ...

    def encode(self, text: str) -> list[int]:
        """Without special tokens, neither added nor recognised."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens left out; bytes that are no UTF-8 become the replacement character."""
        ...

    def special(self, name: str) -> int:
        """Raises ValueError for a name that the tokenizer does not have."""
        ...

    def token_bytes(self) -> list[bytes]:
        """What each id stands for, empty for special tokens."""
        ...


class ByteTokenizer:
    """One id per byte, then four special tokens."""

    SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
    vocab_size = 256 + len(SPECIAL)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="surrogateescape"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

    def special(self, name: str) -> int:
        if name not in self.SPECIAL:
            raise ValueError(f"the byte tokenizer has the special tokens {', '.join(self.SPECIAL)}, not {name}")
        return 256 + self.SPECIAL.index(name)

    def token_bytes(self) -> list[bytes]:
        return [bytes([i]) for i in range(256)] + [b""] * len(self.SPECIAL)

    def to_json(self) -> str:
        """The same tokenizer as a `tokenizer.json`, which goes with the toy's checkpoints."""
        tokenizer = FastTokenizer(models.BPE(vocab=_byte_table(), merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in self.SPECIAL])
        return tokenizer.to_str(pretty=True)


class FileTokenizer:
    """A `tokenizer.json` through the tokenizers library."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"expected a tokenizer file at {path}")
        self._tokenizer = FastTokenizer.from_file(str(path))
        self._tokenizer.encode_special_tokens = True
        # Not the number of tokens: a vocabulary may have gaps.
        self._vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def special(self, name: str) -> int:
        found = self._tokenizer.token_to_id(name)
        if found is None:
            raise ValueError(f"the tokenizer has no token {name}: this chat template needs it")
        return found

    def token_bytes(self) -> list[bytes]:
        table, added = _byte_table(), self._tokenizer.get_added_tokens_decoder()
        found = []
        for i in range(self.vocab_size):
            if i in added:
                found.append(b"" if added[i].special else added[i].content.encode())
            else:
                found.append(_bytes_of(self._tokenizer.id_to_token(i) or "", table))
        return found


def _bytes_of(token: str, table: Mapping[str, int]) -> bytes:
    """Byte-level vocabularies write each byte as one printable character; any other token stands for its text."""
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode()


def _byte_table() -> dict[str, int]:
    """The mapping of GPT-2's byte-level vocabulary (Radford et al. 2019): printable bytes are themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + place): byte for place, byte in enumerate(rest)})
    return table
