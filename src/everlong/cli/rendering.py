"""The tokenizer and chat template of the run's model."""

from __future__ import annotations

from everlong.cli.config import RunConfig
from everlong.rollouts.renderers.chatml import ChatML, Renderer
from everlong.rollouts.renderers.tokenizers import ByteTokenizer


def make_renderer(config: RunConfig) -> Renderer:
    return ChatML(ByteTokenizer(), config.harness.tool_syntax)
