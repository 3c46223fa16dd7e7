"""The tokenizer and chat template of the run's model.

Every model is spoken to in ChatML, whose two special tokens its tokenizer must have. A checkpoint's own template is not
run: some add a system message that nobody wrote (SmolLM2's names the assistant), and what the harness says is what the
model sees.
"""

from __future__ import annotations

import json

from everlong.cli.config import RunConfig
from everlong.models.source import ModelSource, find_model
from everlong.rollouts.renderers.chatml import ChatML, Renderer
from everlong.rollouts.renderers.tokenizers import ByteTokenizer, FileTokenizer

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""What ChatML renders without tools, for those who load the toy's checkpoint elsewhere."""


def make_renderer(config: RunConfig) -> Renderer:
    """Raises ValueError where the checkpoint's tokenizer lacks the special tokens of ChatML."""
    source = find_model(config.model)
    tokenizer = ByteTokenizer() if source.folder is None else FileTokenizer(source.folder / "tokenizer.json")
    return ChatML(tokenizer, config.harness.tool_syntax, opens_thinking=config.harness.opens_thinking)


def checkpoint_companions(source: ModelSource) -> dict[str, bytes]:
    """What lies beside the weights in a checkpoint that the run exports, by name."""
    if source.folder is not None:
        return source.companions()
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": source.shape.max_positions, **names}
    return {
        "tokenizer.json": ByteTokenizer().to_json().encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode(),
        "chat_template.jinja": TEMPLATE.encode(),
    }
