"""The bash agent: a command per turn until the model gives its final answer.

What the harness adds to the conversation holds no time, process id or random name, so that an episode repeats exactly.
"""

from __future__ import annotations

from typing import Any

from everlong.contracts.errors import Reason
from everlong.contracts.ports import Command, ExecResult, Sandbox
from everlong.contracts.records import Task
from everlong.rollouts.config import HarnessConfig
from everlong.rollouts.gateway.session import Session
from everlong.rollouts.messages import Message, ToolCall

BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in bash and read what it prints.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}

ASKED = Message(role="user", content="Answer with a command or say done.")
CUT = Message(
    role="tool", content="[your answer was cut at its limit of tokens and nothing of it was run: say it shorter]"
)

MAX_COMMAND_BYTES = 100_000
"""Linux refuses an argument of 128 KiB. That would look like a failure of the sandbox, and it is the agent's."""


class BashHarness:
    def __init__(self, config: HarnessConfig) -> None:
        self._config = config

    async def run(self, task: Task, session: Session, sandbox: Sandbox) -> Reason:
        """Drive the episode to its end. What the session and the sandbox raise goes on to the runner.

        Of a turn that was cut at its limit nothing runs whose end was not sampled: the model is told, and it counts as a
        stalled turn. A final answer that was cut ends the episode as truncated.
        """
        messages = self._opening(task)
        stalled = 0
        while True:
            reply = await session.chat(messages, (BASH_TOOL,))
            messages.append(reply.message)
            if reply.message.tool_calls:
                stalled = 0
                messages += [await self._call(call, sandbox) for call in reply.message.tool_calls]
            elif reply.malformed or not reply.message.content:
                stalled += 1
                if stalled >= self._config.max_stalled_turns:
                    return Reason.STALLED
                messages.append(CUT if reply.cut else ASKED)
            else:
                return Reason.TRUNCATED if reply.cut else Reason.DONE

    def _opening(self, task: Task) -> list[Message]:
        system = [Message(role="system", content=self._config.system_prompt)] if self._config.system_prompt else []
        return [*system, Message(role="user", content=task.instruction)]

    async def _call(self, call: ToolCall, sandbox: Sandbox) -> Message:
        command = call.arguments.get("command")
        if call.name != "bash" or not isinstance(command, str):
            return Message(role="tool", content=f"no such tool: {call.name} (there is bash, with a string command)")
        if "\0" in command:
            return Message(role="tool", content="a command cannot hold a null byte\n[exit 2]")
        if len(command.encode()) > MAX_COMMAND_BYTES:
            return Message(role="tool", content=f"a command may have {MAX_COMMAND_BYTES} bytes\n[exit 2]")
        result = await sandbox.exec(Command(argv=("bash", "-c", command), timeout_s=self._config.command_timeout_s))
        return Message(role="tool", content=self._shown(result))

    def _shown(self, result: ExecResult) -> str:
        text = shorten(result.output.decode("utf-8", errors="replace").rstrip("\n"), self._config.output_chars)
        notes = []
        if result.truncated:
            notes.append("[output cut at the limit]")
        if result.memory_exceeded:
            notes.append("[killed: out of memory]")
        if result.timed_out:
            notes.append(f"[killed after {self._config.command_timeout_s:g} s]")
        elif result.exit_code:
            notes.append(f"[exit {result.exit_code}]")
        return "\n".join(part for part in (text, *notes) if part)


def shorten(text: str, limit: int) -> str:
    """At most about `limit` characters: the middle goes, and the gap says how much it was."""
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    return f"{text[:head]}\n[{len(text) - head - tail} characters cut]\n{text[len(text) - tail :]}"
