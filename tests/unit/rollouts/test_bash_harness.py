"""What the bash agent tells the model of its commands, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlong.contracts.errors import Reason
from everlong.contracts.ports import Command, ExecResult
from everlong.contracts.records import FinishReason, Task
from everlong.rollouts.config import HarnessConfig
from everlong.rollouts.gateway.session import ChatReply
from everlong.rollouts.harnesses.bash import MAX_COMMAND_BYTES, BashHarness, shorten
from everlong.rollouts.messages import Message, ToolCall

TASK = Task(id="t", folder="t", content_hash="0", instruction="Count.")


@dataclass
class Spoken:
    """Stands where a session stands: prepared answers, and what was asked."""

    answers: list[Message]
    asked: list[list[Message]] = field(default_factory=list)
    cut: bool = False
    """Whether every answer ended at the limit of its tokens."""

    async def chat(self, messages: Sequence[Message], tools: Sequence[dict] = ()) -> ChatReply:
        self.asked.append(list(messages))
        message = self.answers.pop(0)
        return ChatReply(
            message=message,
            finish_reason=FinishReason.LENGTH if self.cut else FinishReason.STOP,
            num_prompt_tokens=1,
            num_sampled_tokens=1,
            malformed=self.cut and message.content.startswith("$"),
        )


@dataclass
class Shell:
    result: ExecResult = field(default_factory=lambda: ExecResult(exit_code=0, output=b""))
    commands: list[Command] = field(default_factory=list)

    async def exec(self, command: Command) -> ExecResult:
        self.commands.append(command)
        return self.result


def call(name: str = "bash", **arguments) -> Message:
    return Message(role="assistant", tool_calls=(ToolCall(id="c", name=name, arguments=arguments),))


DONE = Message(role="assistant", content="done")


async def told(result: ExecResult, **config: int) -> str:
    """What the model is told of a command that ended so."""
    session = Spoken([call(command="x"), DONE])
    assert await BashHarness(HarnessConfig(**config)).run(TASK, session, Shell(result)) is Reason.DONE
    return session.asked[1][-1].content


async def test_a_command_runs_in_bash_with_the_time_limit_of_the_run():
    session, shell = Spoken([call(command="wc -l notes"), DONE]), Shell(ExecResult(exit_code=0, output=b"3 notes\n"))
    reason = await BashHarness(HarnessConfig(command_timeout_s=7)).run(TASK, session, shell)
    assert reason is Reason.DONE
    assert shell.commands == [Command(argv=("bash", "-c", "wc -l notes"), timeout_s=7)]
    assert [message.role for message in session.asked[1]] == ["system", "user", "assistant", "tool"]
    assert session.asked[1][-1].content == "3 notes"


async def test_an_empty_system_prompt_is_left_out():
    session = Spoken([DONE])
    await BashHarness(HarnessConfig(system_prompt="")).run(TASK, session, Shell())
    assert session.asked == [[Message(role="user", content="Count.")]]


@pytest.mark.parametrize(
    "result, text",
    [
        (ExecResult(exit_code=0, output=b""), ""),
        (ExecResult(exit_code=2, output=b"no\n"), "no\n[exit 2]"),
        (ExecResult(exit_code=124, output=b"hi", timed_out=True), "hi\n[killed after 30 s]"),
        (ExecResult(exit_code=137, output=b"", memory_exceeded=True), "[killed: out of memory]\n[exit 137]"),
        (ExecResult(exit_code=0, output=b"x", truncated=True), "x\n[output cut at the limit]"),
        (ExecResult(exit_code=0, output=b"\xff\0ok"), "\ufffd\0ok"),
    ],
    ids=["silent", "failed", "late", "large", "loud", "binary"],
)
async def test_the_model_is_told_how_a_command_ended(result: ExecResult, text: str):
    assert await told(result) == text


async def test_what_the_model_is_told_holds_no_time():
    fast = await told(ExecResult(exit_code=1, output=b"x", elapsed_s=0.1))
    assert fast == await told(ExecResult(exit_code=1, output=b"x", elapsed_s=9.0)) == "x\n[exit 1]"


async def test_a_long_output_is_cut_in_the_middle():
    output = b"a" * 5000 + b"z" * 5000
    text = await told(ExecResult(exit_code=0, output=output), output_chars=100)
    assert text == "a" * 50 + "\n[9900 characters cut]\n" + "z" * 50


@given(text=st.text(), limit=st.integers(1, 30))
def test_shortening_keeps_both_ends_and_counts_what_is_gone(text: str, limit: int):
    short = shorten(text, limit)
    if len(text) <= limit:
        assert short == text
        return
    head, tail = limit - limit // 2, limit // 2
    assert short == f"{text[:head]}\n[{len(text) - limit} characters cut]\n{text[len(text) - tail :]}"


ODD_CALLS = {
    "another tool": (call("browse", url="x"), "no such tool: browse"),
    "no command": (call(), "no such tool"),
    "a command that is a list": (call(command=["ls"]), "no such tool"),
    "a null byte": (call(command="ls \0"), "null byte"),
    "a command the system would refuse": (call(command="x" * (MAX_COMMAND_BYTES + 1)), "100000 bytes"),
}


@pytest.mark.parametrize("name", ODD_CALLS)
async def test_a_call_that_cannot_run_is_explained_and_never_reaches_the_sandbox(name: str):
    message, word = ODD_CALLS[name]
    session, shell = Spoken([message, DONE]), Shell()
    assert await BashHarness(HarnessConfig()).run(TASK, session, shell) is Reason.DONE
    assert word in session.asked[1][-1].content and not shell.commands


async def test_several_calls_in_one_turn_run_in_order_and_answer_in_order():
    both = Message(role="assistant", tool_calls=tuple(call(command=word).tool_calls[0] for word in "ab"))
    session, shell = Spoken([both, DONE]), Shell()
    await BashHarness(HarnessConfig()).run(TASK, session, shell)
    assert [command.argv[2] for command in shell.commands] == ["a", "b"]
    assert [message.role for message in session.asked[1][-2:]] == ["tool", "tool"]


async def test_half_a_command_is_never_run_and_the_model_is_told_until_it_stalls():
    half = Message(role="assistant", content="$ rm -rf /tm")
    session, shell = Spoken([half, half], cut=True), Shell()
    assert await BashHarness(HarnessConfig(max_stalled_turns=2)).run(TASK, session, shell) is Reason.STALLED
    assert not shell.commands
    assert session.asked[1][-1].role == "tool" and "nothing of it was run" in session.asked[1][-1].content


async def test_half_an_answer_is_no_end_of_the_agents_own():
    session = Spoken([Message(role="assistant", content="The number of li")], cut=True)
    assert await BashHarness(HarnessConfig()).run(TASK, session, Shell()) is Reason.TRUNCATED
    assert Reason.TRUNCATED.trustworthy, "what it left behind is graded"


async def test_silence_is_asked_about_and_ends_the_episode_when_it_goes_on():
    silent = Message(role="assistant")
    session = Spoken([silent, silent])
    assert await BashHarness(HarnessConfig(max_stalled_turns=2)).run(TASK, session, Shell()) is Reason.STALLED
    assert session.asked[1][-1].role == "user"
