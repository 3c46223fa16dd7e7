"""One form for the transcripts of agents that nobody here wrote, so that the same history always reads the same.

Agents move system messages about, and dialects split one answer into several items. Whatever they send is brought into
the form in which the session keeps what was said; a form that the agent changes between two calls then continues its
turn. The form of a history does not depend on what is said after the next answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

import msgspec

from everlong.rollouts.gateway.refusals import invalid
from everlong.rollouts.messages import Message


def canonical(messages: Sequence[Message]) -> tuple[Message, ...]:
    """System messages folded, the parts of one answer joined."""
    return tuple(_join_answers(_fold_systems(messages)))


def check_calls(messages: Sequence[Message]) -> None:
    """Raises Refusal, as the vendors' servers do, for a result whose call the assistant's message before it does not hold, and for a
    call without result where the conversation goes on. Where ids are left out the order says what belongs together."""
    asked: dict[str, str] = {}
    """Calls of the assistant's last message by id, with their names."""
    answered: set[str] = set()
    for message in messages:
        if message.role == "tool":
            if message.call_id and message.call_id not in asked:
                raise invalid(
                    f"a tool's result answers call {message.call_id!r}, and the assistant's message before it has no such call"
                )
            answered.add(message.call_id)
        elif message.role == "assistant":
            _check_answered(asked, answered)
            asked, answered = {call.id: call.name for call in message.tool_calls}, set()
    if messages and messages[-1].role != "assistant":
        _check_answered(asked, answered)


def _check_answered(asked: Mapping[str, str], answered: Set[str]) -> None:
    if "" in asked or "" in answered:
        return
    if missing := [f"{ident!r} ({name})" for ident, name in asked.items() if ident not in answered]:
        raise invalid(
            f"the conversation goes on without a tool's result for call {', '.join(missing)}: give one for each"
        )


def _fold_systems(messages: Sequence[Message]) -> list[Message]:
    """Those that come first are one; a later one is a reminder in the user's message beside it, or one of its own.

    Chat templates know one system message, at the start. The form of the reminder is the one that agents themselves use.
    """
    opening = next((place for place, message in enumerate(messages) if message.role != "system"), len(messages))
    folded: list[Message] = []
    if opening:
        content = "\n\n".join(message.content for message in messages[:opening] if message.content)
        folded.append(Message(role="system", content=content))
    waits = False
    """Whether the last one is a reminder that the user's next message may take up."""
    for message in messages[opening:]:
        last = folded[-1] if folded else None
        if message.role == "system":
            reminder = f"<system-reminder>\n{message.content}\n</system-reminder>"
            if last is not None and last.role == "user":
                folded[-1] = _said_on(last, reminder)
            else:
                folded.append(Message(role="user", content=reminder))
                waits = True
        elif message.role == "user" and waits and last is not None:
            folded[-1] = _said_on(last, message.content)
            waits = False
        else:
            folded.append(message)
            waits = False
    return folded


def _said_on(message: Message, text: str) -> Message:
    return msgspec.structs.replace(message, content=f"{message.content}\n{text}")


def _join_answers(messages: Iterable[Message]) -> list[Message]:
    joined: list[Message] = []
    for message in messages:
        if joined and _goes_on(joined[-1], message):
            before = joined[-1]
            joined[-1] = Message(
                role="assistant",
                content=before.content or message.content,
                reasoning="\n".join(part for part in (before.reasoning, message.reasoning) if part),
                tool_calls=(*before.tool_calls, *message.tool_calls),
            )
        else:
            joined.append(message)
    return joined


def _goes_on(before: Message, message: Message) -> bool:
    """Whether two assistant's messages are parts of one answer: thinking, then content, then calls."""
    if before.role != "assistant" or message.role != "assistant":
        return False
    only_calls = bool(message.tool_calls) and not message.content and not message.reasoning
    only_thought = bool(before.reasoning) and not before.content and not before.tool_calls
    return only_calls or only_thought
