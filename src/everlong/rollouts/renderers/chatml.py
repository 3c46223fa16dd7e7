"""ChatML: <|im_start|>role, newline, text, <|im_end|>, newline. The model stops at <|im_end|>; the newline is the template's.

The next prompt is what the engine saw and sampled plus a bridge: the template's separator, the new messages and the
header of the next answer. So nothing that was sampled is ever encoded again, and no separator is lost.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from everlong.contracts.records import Record
from everlong.rollouts.messages import Message, ToolCall
from everlong.rollouts.renderers.tokenizers import Tokenizer

ToolSyntax = Literal["dollar", "hermes"]
_HERMES = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


_OPEN, _CLOSE = "<think>", "</think>"


class Thinking(Record, frozen=True, kw_only=True):
    """The ids of an answer's thinking, its tags among them."""

    num_opened: int
    """At the end of the prompt."""
    num_sampled: int
    """At the start of what was sampled."""
    separable: bool
    """Whether what follows can do without them: it was answered, and its first token holds nothing of the thinking."""


class ParsedTurn(Record, frozen=True, kw_only=True):
    content: str
    reasoning: str = ""
    """What stood between <think> tags before the answer."""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: bool = False
    """The text holds a call that cannot be read."""


class _HermesCall(msgspec.Struct):
    name: str
    arguments: dict[str, Any]


class Renderer(Protocol):
    tokenizer: Tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """A whole prompt, ending with the header of the answer."""
        ...

    def bridge(self, last_sampled: int, messages: Sequence[Message]) -> list[int]:
        """What follows a sampled turn whose last id was `last_sampled`."""
        ...

    def parse(self, ids: Sequence[int], turn: int, *, cut: bool = False, calls: bool = True) -> ParsedTurn:
        """`cut`: the turn ended at its limit of tokens. A call whose end was not sampled is malformed, never a call. Without `calls`
        what reads like one is text."""
        ...

    def thinking(self, ids: Sequence[int]) -> Thinking:
        """Where in a prompt and the `ids` sampled behind it the answer's thinking stands."""
        ...

    def answer(self, message: Message) -> list[int]:
        """The ids a model would have to sample to say this assistant message, with the end of the turn."""
        ...


class ChatML:
    """`opens_thinking`: the prompt of an answer ends with <think>, and the model samples only its end."""

    def __init__(
        self, tokenizer: Tokenizer, tool_syntax: ToolSyntax = "dollar", *, opens_thinking: bool = False
    ) -> None:
        self.tokenizer, self._syntax = tokenizer, tool_syntax
        self._start, self._end = tokenizer.special("<|im_start|>"), tokenizer.special("<|im_end|>")
        self._newline = tokenizer.encode("\n")
        self._header = [self._start, *tokenizer.encode("assistant\n")]
        self._opening = tokenizer.encode("<think>\n") if opens_thinking else []

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return (self._end,)

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        if tools and self._syntax == "hermes":
            messages = _with_tools(messages, tools)
        return [*self._render(messages), *self._header, *self._opening]

    def bridge(self, last_sampled: int, messages: Sequence[Message]) -> list[int]:
        closing = [] if last_sampled == self._end else [self._end]
        return [*closing, *self._newline, *self._render(messages), *self._header, *self._opening]

    def parse(self, ids: Sequence[int], turn: int, *, cut: bool = False, calls: bool = True) -> ParsedTurn:
        reasoning, text = _split_reasoning(self.tokenizer.decode(ids), bool(self._opening))
        if not calls:
            return ParsedTurn(content=text.strip(), reasoning=reasoning)
        parsed = _parse_dollar(text, turn, cut) if self._syntax == "dollar" else _parse_hermes(text, turn)
        return msgspec.structs.replace(parsed, reasoning=reasoning)

    def thinking(self, ids: Sequence[int]) -> Thinking:
        """It ends with the token that ends </think> and the space behind; a token that goes on with words ends nothing."""
        opened = len(self._opening)
        said = self.tokenizer.decode(ids)
        if not opened and not said.lstrip().startswith(_OPEN):
            return Thinking(num_opened=0, num_sampled=0, separable=True)
        if _CLOSE not in said:
            return Thinking(num_opened=opened, num_sampled=len(ids), separable=False)
        decode = self.tokenizer.decode
        end = bisect.bisect_left(range(len(ids)), True, key=lambda last: _CLOSE in decode(ids[: last + 1])) + 1
        separable = not decode(ids[:end]).partition(_CLOSE)[2].strip()
        while end < len(ids) and (piece := decode([ids[end]])) and not piece.strip():
            end += 1
        return Thinking(num_opened=opened, num_sampled=end, separable=separable)

    def answer(self, message: Message) -> list[int]:
        thought = [*self.tokenizer.encode("</think>"), *self._newline] if self._opening else []
        return [*thought, *self.tokenizer.encode(self._text(message)), self._end]

    def _render(self, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            role, text = message.role, self._text(message)
            if role == "tool" and self._syntax == "hermes":
                role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
            ids += [self._start, *self._body(role, text), self._end, *self._newline]
        return ids

    def _body(self, role: str, text: str) -> list[int]:
        """What an assistant said is encoded by itself, as it was sampled: after the header, not with it."""
        if role == "assistant":
            return [*self._header[1:], *self.tokenizer.encode(text)]
        return self.tokenizer.encode(f"{role}\n{text}")

    def _text(self, message: Message) -> str:
        if not message.tool_calls:
            return message.content
        if self._syntax == "dollar":
            return "\n".join(f"$ {call.arguments.get('command', '')}" for call in message.tool_calls)
        calls = [
            f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"
            for call in message.tool_calls
        ]
        return "\n".join([message.content, *calls] if message.content else calls)


def _split_reasoning(text: str, opened: bool) -> tuple[str, str]:
    """Thinking and the rest. Thinking that does not end has no rest: nothing was answered."""
    stripped = text.lstrip()
    if not opened and not stripped.startswith(_OPEN):
        return "", text
    thinking, _, rest = stripped.removeprefix(_OPEN).partition(_CLOSE)
    return thinking.strip(), rest


def _parse_dollar(text: str, turn: int, cut: bool) -> ParsedTurn:
    """A command ends with its turn, so that a cut turn holds half of one."""
    stripped = text.lstrip()
    if not stripped.startswith("$"):
        return ParsedTurn(content=text.strip())
    command = stripped[1:].strip()
    if not command or cut:
        return ParsedTurn(content=text.strip() if cut else "", malformed=True)
    call = ToolCall(id=f"call-{turn}-0", name="bash", arguments={"command": command})
    return ParsedTurn(content="", tool_calls=(call,))


def _parse_hermes(text: str, turn: int) -> ParsedTurn:
    calls, malformed = [], False
    for place, match in enumerate(_HERMES.finditer(text)):
        try:
            body = msgspec.json.decode(match[1], type=_HermesCall)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            malformed = True
        else:
            calls.append(ToolCall(id=f"call-{turn}-{place}", name=body.name, arguments=body.arguments))
    content = _HERMES.sub("", text).strip()
    malformed = malformed or "<tool_call>" in content
    return ParsedTurn(content=content, tool_calls=tuple(calls), malformed=malformed)


def _with_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    listing = "\n".join(json.dumps(tool) for tool in tools)
    text = (
        f"You may call these tools:\n<tools>\n{listing}\n</tools>\nTo call one, answer with "
        '<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'
    )
    if messages and messages[0].role == "system":
        first = Message(role="system", content=f"{messages[0].content}\n\n{text}")
        return [first, *messages[1:]]
    return [Message(role="system", content=text), *messages]
