"""Whatever an agent does to what it repeats, in any dialect: no sampled id is encoded again, and each has one fate."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.rollouts.clients import Habits, TwoFaced, body_of, echo
from tests.unit.rollouts.sessions import Journal
from tests.unit.rollouts.test_dialects import DIALECTS

from everlong.contracts.records import EpisodeOrder, GenerateRequest, Purpose, SamplingParams
from everlong.engines.scripted import ScriptedEngine
from everlong.rollouts.gateway.keys import Entry
from everlong.rollouts.gateway.session import Session, SessionLimits
from everlong.rollouts.messages import Message
from everlong.rollouts.renderers.chatml import ChatML
from everlong.trajectories.tree import EpisodeTree

TOKENIZER = TwoFaced()
END = TOKENIZER.special("<|im_end|>")
ORDER = EpisodeOrder(task="t", group=4, attempt=2, purpose=Purpose.TRAIN, incarnation=1)

words = st.text(st.sampled_from("ab é\n"), max_size=6)
habits = st.builds(
    Habits,
    drops_thinking=st.booleans(),
    shuffles=st.booleans(),
    renames=st.booleans(),
    folds=st.booleans(),
    spaces=st.booleans(),
    seed=st.integers(0, 9),
)


@dataclass(frozen=True)
class Step:
    """A turn: what the model says, whether the client loses the first answer, and what comes next."""

    thought: str
    said: str
    calls: tuple[str, ...]
    lost: bool
    reminded: bool
    habits: Habits

    @property
    def text(self) -> str:
        thinking = f"<think>{self.thought}</think>" if self.thought.strip() else ""
        calls = [json.dumps({"name": "bash", "arguments": {"command": c, "n": 1}}) for c in self.calls]
        return thinking + self.said + "".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


steps = st.builds(
    Step,
    thought=words,
    said=words,
    calls=st.lists(words.map(str.strip), max_size=3, unique=True).map(tuple),
    lost=st.booleans(),
    reminded=st.booleans(),
    habits=habits,
)


@dataclass
class World:
    """A session behind a key, and the engine's own account of what it saw and said."""

    script: list[str]
    thinking: str = "keep"
    seen: list[list[int]] = field(default_factory=list)
    num_sampled: int = 0

    def __post_init__(self) -> None:
        renderer, self.journal = ChatML(TOKENIZER, "hermes"), Journal()
        engine = ScriptedEngine(self._say, token_bytes=TOKENIZER.token_bytes(), max_context=1 << 16, policy_version=0)
        self.session = Session(
            ORDER,
            engine=engine,
            renderer=renderer,
            params=SamplingParams(max_tokens=1 << 12, stop_ids=renderer.stop_ids),
            run_seed=7,
            limits=SessionLimits(max_turns=999, max_context=1 << 16),
            journal=self.journal,
            thinking=self.thinking,
        )
        self.entry = Entry("key", live={self.session})

    def _say(self, request: GenerateRequest) -> list[int]:
        self.seen.append(request.prompt_ids.tolist())
        said = [*TOKENIZER.sampled(self.script[0]), END]
        self.num_sampled += len(said)
        return said

    async def ask(self, dialect: str, messages: list[Message], *, lost: bool = False) -> Message | None:
        """One call, as the server makes it: sampled, then recorded or, where the client is gone, discarded."""
        request = DIALECTS[dialect].parse(body_of(dialect, messages))
        async with self.session.lock:
            pending = await self.session.sample(self.entry.transcript(request), request.tools)
            if lost:
                await self.session.discard(pending, "client_gone")
                self.seen.pop()
                return None
            await self.session.record(pending)
        self.script.pop(0)
        return pending.chat.message

    def check_accounts(self) -> None:
        """Joining a path gives what the engine saw, and every token that it sampled is in one turn or discarded."""
        tree = EpisodeTree(self.session.turns)
        assert [tree.prompt_ids(turn).tolist() for turn in tree.turns] == self.seen
        in_turns = sum(turn.sampled.num_sampled for turn in tree.turns)
        assert in_turns + self.session.num_discarded == self.num_sampled == sum(n for _, n in self.journal.facts)


def opening(reminded: bool) -> list[Message]:
    system = [Message(role="system", content=text) for text in ("s", "t")]
    return [*system, Message(role="user", content="u"), *([Message(role="system", content="r")] if reminded else [])]


def what_follows(answer: Message, step: Step) -> list[Message]:
    """Results of the calls, or the user's next words; then perhaps a reminder."""
    results = [Message(role="tool", content=f"{n} of", call_id=call.id) for n, call in enumerate(answer.tool_calls)]
    said = results or [Message(role="user", content="next")]
    return [*said, *([Message(role="system", content="r")] if step.reminded else [])]


@settings(max_examples=50)
@given(dialect=st.sampled_from(sorted(DIALECTS)), play=st.lists(steps, min_size=1, max_size=5))
def test_an_agent_that_only_repeats_continues_one_path_in_which_nothing_is_encoded_again(dialect, play):
    async def talk() -> None:
        world, spoken = World([step.text for step in play]), opening(play[0].reminded)
        for step in play:
            repeated = echo(spoken, step.habits)
            if step.lost:
                await world.ask(dialect, repeated, lost=True)
            answer = await world.ask(dialect, repeated)
            spoken += [answer, *what_follows(answer, step)]
        turns = world.session.turns
        assert [turn.parent for turn in turns] == list(range(-1, len(play) - 1))
        assert (world.session.num_forks, len(turns)) == (0, len(play))
        for turn, step in zip(turns, play, strict=True):
            assert turn.context.ids.max() < TOKENIZER.SAMPLED, "only what is new is encoded"
            assert turn.sampled.ids.tolist() == [*TOKENIZER.sampled(step.text), END]
        world.check_accounts()

    asyncio.run(talk())


@settings(max_examples=50)
@given(
    dialect=st.sampled_from(sorted(DIALECTS)),
    play=st.lists(steps, min_size=2, max_size=5),
    place=st.integers(0, 20),
    thinking=st.sampled_from(["keep", "strip_and_branch"]),
)
def test_an_agent_that_rewrites_its_history_forks_and_loses_nothing(dialect, play, place, thinking):
    async def talk() -> None:
        world, spoken = World([step.text for step in play], thinking), opening(reminded=False)
        for step in play[:-1]:
            answer = await world.ask(dialect, echo(spoken, step.habits))
            new = what_follows(answer, step)
            spoken += [answer, *new]
        seen = spoken[: len(spoken) - len(new)]
        told = [n for n, message in enumerate(seen) if message.role in ("user", "assistant")]
        edited = told[place % len(told)]
        was = spoken[edited]
        spoken[edited] = Message(role=was.role, content="otherwise", tool_calls=was.tool_calls)
        kept = sum(1 for message in spoken[:edited] if message.role == "assistant")
        await world.ask(dialect, spoken)
        last = world.session.turns[-1]
        assert last.parent < kept, "it continues at most what stands before the edit"
        assert world.session.num_forks == 1
        world.check_accounts()

    asyncio.run(talk())


@settings(max_examples=40)
@given(dialect=st.sampled_from(sorted(DIALECTS)), play=st.lists(steps, min_size=1, max_size=5))
def test_stripped_thinking_leaves_the_sampled_ids_around_it(dialect, play):
    async def talk() -> None:
        world, spoken = World([step.text for step in play], "strip_and_branch"), opening(reminded=False)
        for step in play:
            answer = await world.ask(dialect, echo(spoken, step.habits))
            spoken += [answer, *what_follows(answer, step)]
        assert world.session.num_forks == 0
        sampled = [turn.sampled.ids.tolist() for turn in world.session.turns]
        for turn, prompt in enumerate(world.seen):
            left = [i for i in prompt if i >= TOKENIZER.SAMPLED]
            answered = [
                [i for i in (ids if _keeps_thought(play, earlier, turn) else _answered(ids)) if i != END]
                for earlier, ids in enumerate(sampled[:turn])
            ]
            assert left == [i for ids in answered for i in ids]
        world.check_accounts()

    asyncio.run(talk())


def _keeps_thought(play: list[Step], earlier: int, turn: int) -> bool:
    """Whether only tools have answered since."""
    return all(step.calls and not step.reminded for step in play[earlier:turn])


def _answered(ids: list[int]) -> list[int]:
    """Without thinking, its tags and the space behind; worked out from the text."""
    text = TOKENIZER.decode(ids)
    if not text.lstrip().startswith("<think>"):
        return ids
    answer = text.partition("</think>")[2]
    while answer and answer[0] in " \n":
        answer = answer[1:]
    return [*TOKENIZER.sampled(answer), END]


@settings(max_examples=15)
@given(play=st.lists(steps, min_size=2, max_size=5))
def test_a_response_that_is_named_stands_for_all_that_was_said(play):
    async def talk() -> None:
        whole, named = (World([step.text for step in play]) for _ in range(2))
        spoken, ident, new = opening(reminded=False), "", opening(reminded=False)
        for number, step in enumerate(play):
            answer = await whole.ask("responses", spoken)
            more = {"previous_response_id": ident} if ident else {}
            request = DIALECTS["responses"].parse(body_of("responses", new, **more))
            reply = await named.session.chat(named.entry.transcript(request), request.tools)
            named.script.pop(0)
            ident = f"resp_{number}"
            named.entry.remember(ident, request, reply.message)
            new = what_follows(answer, step)
            spoken += [answer, *new]
        for mine, theirs in zip(whole.session.turns, named.session.turns, strict=True):
            assert np.array_equal(mine.context.ids, theirs.context.ids) and mine.parent == theirs.parent

    asyncio.run(talk())


def test_a_call_late_in_an_episode_encodes_no_more_than_an_early_one():
    class Counting(TwoFaced):
        num_encoded = 0

        def encode(self, text: str) -> list[int]:
            ids = super().encode(text)
            self.num_encoded += len(ids)
            return ids

    async def talk() -> None:
        world, counting = World(["so"] * 120), Counting()
        world.session._conversation._renderer.tokenizer = counting
        spoken, encoded = opening(reminded=False), []
        for _ in range(120):
            before = counting.num_encoded
            spoken += [await world.ask("chat", spoken), Message(role="user", content="next")]
            encoded.append(counting.num_encoded - before)
        assert set(encoded[1:]) == {len("user\nnext")}

    asyncio.run(talk())
