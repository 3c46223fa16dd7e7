"""A llama in a GGUF file, written as a checkpoint folder in the layout of Hugging Face: float32, by numpy, without torch.

Run as a process of its own: python -m everlong.models.gguf_checkpoint SOURCE.gguf EMPTY_FOLDER

Two things are undone. Weights are dequantised. And GGUF keeps the rows of the query and key projections in the order in
which rotary pairs are neighbours; here a pair is a row of the first and a row of the second half of a head.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from everlong.models.llama.checkpoint_names import weight_shapes
from everlong.models.llama.config import LlamaConfig

CONTROL = 3
"""GGUF's type of a token that stands for no text."""
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, target: Path) -> None:
    """Raises ValueError for another architecture or tokenizer, and where the tensors are not those of the shape."""
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = shape_of(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    weights = {}
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = half_split_rows(weight, config.head_dim)
        weights[name] = np.ascontiguousarray(weight)
    shapes = {name: weight.shape for name, weight in weights.items()}
    if shapes != weight_shapes(config):
        wrong = sorted(shapes.items() ^ weight_shapes(config).items())
        raise ValueError(f"{source} does not hold the tensors of its own shape, they differ in {wrong[:4]}")
    special = {f"{use}_token_id": fields[f"tokenizer.ggml.{key}_token_id"] for use, key in _SPECIAL.items()}
    _write_json(target / "config.json", {**config.to_hf(), **special, "dtype": "float32"})
    _write_json(target / "generation_config.json", special)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(fields, target)


_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}


def shape_of(fields: dict[str, Any], *, tied: bool) -> LlamaConfig:
    if fields["general.architecture"] != "llama":
        raise ValueError(f"expected a GGUF file of a llama, its architecture is {fields['general.architecture']!r}")
    heads, width = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    rows = len(fields["tokenizer.ggml.tokens"])
    return LlamaConfig(
        vocab_size=rows,
        padded_vocab_size=rows,
        hidden_size=width,
        intermediate_size=fields["llama.feed_forward_length"],
        num_layers=fields["llama.block_count"],
        num_heads=heads,
        num_kv_heads=fields["llama.attention.head_count_kv"],
        head_dim=width // heads,
        rope_theta=fields["llama.rope.freq_base"],
        # a float32 in the file: 1e-5 comes as 9.99999974e-06, and the number that was meant is the short one
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        tie_embeddings=tied,
        max_positions=fields["llama.context_length"],
    )


def hf_name(name: str) -> str:
    """Raises ValueError for a tensor that a llama does not have."""
    if name in _NAMES:
        return _NAMES[name]
    prefix, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    part = part.removesuffix(".weight")
    if prefix != "blk" or part not in LAYER_NAMES:
        raise ValueError(f"a llama has no tensor {name}")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"


def half_split_rows(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows (pair, side) of every head in the order (side, pair)."""
    rows, columns = weight.shape
    return weight.reshape(-1, head_dim // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_tokenizer(fields: dict[str, Any], target: Path) -> None:
    """tokenizer.json, what transformers wants to know beside it, and the chat template.

    Raises ValueError for a tokenizer whose way of cutting text into pieces is not known here: wrong pieces give ids that
    the model has rarely seen.
    """
    kind, pieces = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if (kind, pieces) != ("gpt2", "smollm"):
        raise ValueError(f"expected a byte-level tokenizer of SmolLM, the file's is {kind!r} with pieces {pieces!r}")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # every digit is a piece of its own, cut off before the blanks in front of it are looked at
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(target / "tokenizer.json"))
    named = {f"{use}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for use, key in _SPECIAL.items()}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": fields["llama.context_length"]}
    _write_json(target / "tokenizer_config.json", {**settings, **named, "clean_up_tokenization_spaces": False})
    (target / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
