"""Agents that write the same conversation in the words of each dialect, and each time a little otherwise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from everlong.rollouts.messages import Message, ToolCall
from everlong.rollouts.renderers.tokenizers import ByteTokenizer


class TwoFaced(ByteTokenizer):
    """Every byte has two ids: one that encoding gives, and one that is only ever sampled."""

    SAMPLED = ByteTokenizer.vocab_size
    vocab_size = SAMPLED + 256

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode([i - self.SAMPLED if i >= self.SAMPLED else i for i in ids])

    def token_bytes(self) -> list[bytes]:
        return [*super().token_bytes(), *(bytes([i]) for i in range(256))]

    def sampled(self, text: str) -> list[int]:
        return [self.SAMPLED + byte for byte in text.encode()]


@dataclass(frozen=True)
class Habits:
    """What an agent does to what it repeats. `seed` settles the order of things it shuffles."""

    drops_thinking: bool = False
    drops_calls: bool = False
    shuffles: bool = False
    renames: bool = False
    folds: bool = False
    spaces: bool = False
    seed: int = 0


def echo(messages: Sequence[Message], habits: Habits) -> list[Message]:
    """The same conversation as an agent with these habits repeats it."""
    random, names = Random(habits.seed), {}
    repeated = []
    for message in messages:
        calls = [_renamed(call, habits) for call in message.tool_calls]
        names |= {call.id: new.id for call, new in zip(message.tool_calls, calls, strict=True)}
        if habits.shuffles:
            random.shuffle(calls)
        space = " \n" if habits.spaces and message.role == "assistant" else ""
        repeated.append(
            msgspec.structs.replace(
                message,
                tool_calls=tuple(calls),
                content=message.content + space,
                reasoning="" if habits.drops_thinking else message.reasoning,
                call_id=names.get(message.call_id, message.call_id),
            )
        )
    repeated = _shuffled_results(repeated, random) if habits.shuffles else repeated
    return _folded(repeated) if habits.folds else repeated


def _renamed(call: ToolCall, habits: Habits) -> ToolCall:
    ident = f"toolu-{call.id[::-1]}" if habits.renames else call.id
    values = {name: float(v) if habits.renames and type(v) is int else v for name, v in call.arguments.items()}
    return ToolCall(id=ident, name=call.name, arguments=dict(sorted(values.items(), reverse=habits.renames)))


def _shuffled_results(messages: list[Message], random: Random) -> list[Message]:
    shuffled, run = [], []
    for message in [*messages, None]:
        if message is not None and message.role == "tool":
            run.append(message)
            continue
        random.shuffle(run)
        shuffled += [*run, *([message] if message is not None else [])]
        run = []
    return shuffled


def _folded(messages: list[Message]) -> list[Message]:
    """Reminders within the user's message before them, as many agents write them."""
    folded = messages[:1]
    for message in messages[1:]:
        if message.role == "system" and folded[-1].role == "user":
            text = f"{folded[-1].content}\n<system-reminder>\n{message.content}\n</system-reminder>"
            folded[-1] = Message(role="user", content=text)
        else:
            folded.append(message)
    return folded


def body_of(dialect: str, messages: Sequence[Message], **more: Any) -> bytes:
    wire = {"chat": _chat, "responses": _responses, "messages": _messages}[dialect]
    return json.dumps({**wire(messages), **more}).encode()


def _chat(messages: Sequence[Message]) -> dict[str, Any]:
    wire = []
    for message in messages:
        said: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.role == "tool":
            said["tool_call_id"] = message.call_id
        if message.reasoning:
            said["reasoning_content"] = message.reasoning
        if message.tool_calls:
            said["content"] = message.content or None
            said["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
                for c in message.tool_calls
            ]
        wire.append(said)
    return {"messages": wire}


def _responses(messages: Sequence[Message]) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "tool":
            items.append({"type": "function_call_output", "call_id": message.call_id, "output": message.content})
            continue
        if message.reasoning:
            items.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": message.reasoning}]})
        if message.content or not message.tool_calls:
            items.append({"role": message.role, "content": message.content})
        for c in message.tool_calls:
            call = {"call_id": c.id, "name": c.name, "arguments": json.dumps(c.arguments, indent=1)}
            items.append({"type": "function_call", **call})
    return {"input": items}


def _messages(messages: Sequence[Message]) -> dict[str, Any]:
    """The first system messages in their own place, results as blocks of the user's message."""
    num_system = next((n for n, message in enumerate(messages) if message.role != "system"), len(messages))
    wire: list[dict[str, Any]] = []
    for message in messages[num_system:]:
        if message.role == "tool":
            block = {"type": "tool_result", "tool_use_id": message.call_id, "content": message.content}
            if wire and wire[-1]["role"] == "user" and isinstance(wire[-1]["content"], list):
                wire[-1]["content"].append(block)
            else:
                wire.append({"role": "user", "content": [block]})
        elif message.role == "assistant":
            blocks: list[dict[str, Any]] = [{"type": "text", "text": message.content}]
            if message.reasoning:
                blocks.insert(0, {"type": "thinking", "thinking": message.reasoning, "signature": "s"})
            blocks += [
                {"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in message.tool_calls
            ]
            wire.append({"role": "assistant", "content": blocks})
        else:
            wire.append({"role": message.role, "content": message.content})
    system = [{"type": "text", "text": message.content} for message in messages[:num_system]]
    return {"system": system, "messages": wire, "max_tokens": 1}
