"""Settings of the agent loop."""

from typing import Literal

from pydantic import Field

from everlong.contracts.config import Config
from everlong.contracts.import_path import PATTERN

ThinkingHistory = Literal["keep", "strip_and_branch"]


class HarnessConfig(Config):
    type: str = Field("bash", pattern=rf"^(bash|{PATTERN})$")
    """bash: the model answers with a command or with its final answer, and reads what the command printed. Or a harness of
    your own, as package.module:name; it is called with these settings and takes of them what it needs."""
    system_prompt: str = "Answer with `$ command` to run a command in bash. Say done when the task is finished."
    """Empty for none."""
    tool_syntax: Literal["dollar", "hermes"] = "dollar"
    """How a call stands in the text: `$ command`, or a JSON object between <tool_call> tags."""
    opens_thinking: bool = False
    """Whether the prompt of an answer ends with <think>, as for a model that was trained so; it samples only the end of it."""
    thinking: ThinkingHistory = "keep"
    """Of earlier answers. keep: it stays in the prompts, whatever the agent repeats. strip_and_branch: a user's message takes
    it out of the prompts that follow, which are a branch of their own; what was thought trains where it was sampled."""
    max_turns: int = Field(16, ge=1)
    """Model calls after which the episode ends; what it left behind is graded."""
    max_context: int | None = Field(None, ge=16)
    """Tokens of prompt and answer together; None is what the engine allows."""
    command_timeout_s: float = Field(30.0, gt=0)
    """Of one command; then it and everything it started is killed and the model is told."""
    output_chars: int = Field(4000, ge=64)
    """Of a command's output that the model sees; the middle is cut out and the cut is said."""
    max_stalled_turns: int = Field(3, ge=1)
    """Turns in a row with neither a call nor a word, after which the episode ends."""
