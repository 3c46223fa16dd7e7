"""The byte tokenizer as a tokenizer.json."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from everlong.rollouts.renderers.tokenizers import ByteTokenizer, FileTokenizer

BYTES = ByteTokenizer()


def from_file(folder: Path) -> FileTokenizer:
    (folder / "tokenizer.json").write_text(BYTES.to_json())
    return FileTokenizer(folder / "tokenizer.json")


def test_the_file_has_the_same_ids_bytes_and_special_tokens(tmp_path: Path):
    file = from_file(tmp_path)
    assert file.vocab_size == BYTES.vocab_size == 260
    assert file.token_bytes() == BYTES.token_bytes()
    assert [file.special(name) for name in BYTES.SPECIAL] == [256, 257, 258, 259]


def test_every_text_has_the_same_ids_and_comes_back(tmp_path_factory):
    file = from_file(tmp_path_factory.mktemp("tokenizer"))

    @given(st.text(max_size=40))
    def check(text: str) -> None:
        assert file.encode(text) == BYTES.encode(text)
        assert file.decode(BYTES.encode(text)) == text

    check()
    assert file.encode("<|im_end|> é\n") == BYTES.encode("<|im_end|> é\n"), "a special token's name is letters"
