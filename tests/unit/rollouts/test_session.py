"""Sessions: the next prompt is what was seen and sampled plus what is new, and every sampled token is accounted for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from everlong.contracts.errors import EngineError, RequestAborted, StaleWeights, WorkerDied
from everlong.contracts.records import (
    EngineStatus,
    EpisodeOrder,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Purpose,
    SamplingParams,
    Turn,
    decode_record,
    encode_record,
)
from everlong.contracts.tokens import STREAMS, TokenColumns
from everlong.engines.scripted import Fault, ScriptedEngine
from everlong.rollouts.gateway.session import ContextFull, Session, SessionClosed, SessionLimits, TurnLimit
from everlong.rollouts.messages import Message, ToolCall
from everlong.rollouts.renderers.chatml import ChatML, ParsedTurn, Thinking
from everlong.rollouts.renderers.tokenizers import ByteTokenizer
from everlong.trajectories.tree import EpisodeTree

ORDER = EpisodeOrder(task="t", group=4, attempt=2, purpose=Purpose.TRAIN, min_policy_version=0, incarnation=1)


class ToyTok:
    """Greedy longest match over a few pieces: encoding is not the inverse of decoding, as with every BPE."""

    IDS = (1, 2, 3, 10, 20, 21, 5, 6, 7, 30, 40, 41, 42, 50, 51, 60, 61, 62, 63)
    TEXTS = ("user\n", "assistant\n", "tool\n", "\n", *"prab", "ab", "ok", *"ynz", "<think>", "</think>", *"hsit")
    PIECES = dict(zip(TEXTS, IDS, strict=True))
    SPECIAL = {"<|im_start|>": 90, "<|im_end|>": 91}
    vocab_size = 92

    def encode(self, text: str) -> list[int]:
        ids = []
        while text:
            piece = max((p for p in self.PIECES if text.startswith(p)), key=len)
            ids.append(self.PIECES[piece])
            text = text[len(piece) :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        pieces = {i: piece for piece, i in self.PIECES.items()}
        return "".join(pieces.get(i, "") for i in ids)

    def special(self, name: str) -> int:
        return self.SPECIAL[name]

    def token_bytes(self) -> list[bytes]:
        pieces = {i: piece.encode() for piece, i in self.PIECES.items()}
        return [pieces.get(i, b"") for i in range(self.vocab_size)]


class BareRenderer:
    """Text without a template: the smallest setting in which encoding again goes wrong."""

    tokenizer = ToyTok()
    stop_ids = ()

    def render(self, messages, tools=()):
        return self.tokenizer.encode("".join(message.content for message in messages))

    def bridge(self, last_sampled, messages):
        return self.render(messages)

    def parse(self, ids, turn, *, cut=False):
        return ParsedTurn(content=self.tokenizer.decode(ids))

    def thinking(self, ids):
        return Thinking(num_opened=0, num_sampled=0, separable=True)

    def answer(self, message):
        return self.tokenizer.encode(message.content)


@dataclass
class Journal:
    facts: list[tuple[str, int]] = field(default_factory=list)
    write: Callable[[], object] | None = None

    async def turn_sampled(self, order: EpisodeOrder, turn: int, num_tokens: int) -> None:
        assert order == ORDER
        await self._note(f"turn {turn}", num_tokens)

    async def tokens_discarded(self, order: EpisodeOrder, num_tokens: int, reason: str) -> None:
        await self._note(reason, num_tokens)

    async def call_uncounted(self, order: EpisodeOrder, max_tokens: int, reason: str) -> None:
        await self._note(f"uncounted, {reason}", max_tokens)

    async def _note(self, what: str, num_tokens: int) -> None:
        if self.write is not None:
            await self.write()
        self.facts.append((what, num_tokens))


Answer = Callable[[GenerateRequest], GenerateReply]


@dataclass
class FakeEngine:
    """Answers with prepared replies and keeps what it was asked. `held` makes it wait for an abort."""

    answers: list[Answer]
    requests: list[GenerateRequest] = field(default_factory=list)
    held: bool = False
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.requests.append(request)
        if self.held:
            await self.aborted.wait()
        return self.answers.pop(0)(request)

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        assert request_ids == (self.requests[-1].request_id,)
        self.aborted.set()

    async def update(self, policy_version: int) -> EngineStatus:
        return await self.status()

    async def status(self) -> EngineStatus:
        return EngineStatus(policy_version=3, fingerprint="fake")

    async def close(self) -> None: ...


def reply(
    ids: Sequence[int], logprobs: Sequence[float] | None = None, reason: FinishReason = FinishReason.STOP
) -> Answer:
    def answer(request: GenerateRequest) -> GenerateReply:
        columns = TokenColumns.sampled_tokens(ids, [-0.5] * len(ids) if logprobs is None else logprobs, version=3)
        return GenerateReply(request_id=request.request_id, columns=columns, finish_reason=reason)

    return answer


def make_session(
    engine, renderer, journal: Journal | None = None, *, max_tokens=64, max_turns=8, max_context=1000, **more
):
    return Session(
        ORDER,
        engine=engine,
        renderer=renderer,
        params=SamplingParams(temperature=1.0, max_tokens=max_tokens, stop_ids=renderer.stop_ids),
        run_seed=7,
        limits=SessionLimits(max_turns=max_turns, max_context=max_context),
        journal=journal or Journal(),
        **more,
    )


def user(text: str) -> Message:
    return Message(role="user", content=text)


def tool(text: str) -> Message:
    return Message(role="tool", content=text)


# Prompts -------------------------------------------------------------------------------------------------------------


async def test_sampled_ids_are_never_encoded_again():
    engine = FakeEngine([reply([5, 6], [-0.1, -0.2]), reply([7])])
    session = make_session(engine, BareRenderer())
    first = await session.chat([user("pr")])
    assert (engine.requests[0].prompt_ids.tolist(), first.message.content) == ([20, 21], "ab")
    assert ToyTok().encode("prab") == [20, 21, 7], "encoding the text again would give another sequence"
    await session.chat([user("pr"), first.message, tool("ok")])
    assert engine.requests[1].prompt_ids.tolist() == [20, 21, 5, 6, 30]
    tree = EpisodeTree(session.turns)
    columns = tree.columns(session.turns[1]).slice(0, 5)
    assert columns.trainable.astype(int).tolist() == [0, 0, 1, 1, 0]
    assert columns.logprobs[2:4].tolist() == pytest.approx([-0.1, -0.2])
    assert np.isnan(columns.logprobs[[0, 1, 4]]).all()
    assert session.num_forks == 0


async def test_a_history_that_a_client_encoded_again_is_counted_and_deviates_at_a_known_token():
    session = make_session(FakeEngine([reply([5, 6]), reply([7])]), BareRenderer())
    await session.chat([user("pr")])
    await session.chat([user("prabok")])
    tree, last = EpisodeTree(session.turns), session.turns[1]
    assert tree.prompt_ids(last).tolist() == [20, 21, 7, 30]
    assert (session.num_forks, tree.departure(last)) == (1, 2)


async def test_the_separator_behind_a_turn_is_there_once_and_is_context():
    engine = FakeEngine([reply([41, 91]), reply([41, 91])])
    session = make_session(engine, ChatML(ToyTok()))
    first = await session.chat([user("y")])
    assert engine.requests[0].prompt_ids.tolist() == [90, 1, 40, 91, 10, 90, 2]
    spoken = [user("y"), first.message, tool("z")]
    await session.chat(spoken)
    second = engine.requests[1].prompt_ids.tolist()
    assert second == [90, 1, 40, 91, 10, 90, 2, 41, 91, 10, 90, 3, 42, 91, 10, 90, 2]
    assert second == ChatML(ToyTok()).render(spoken)
    columns = EpisodeTree(session.turns).columns(session.turns[1])
    assert np.flatnonzero(columns.sampled).tolist() == [7, 8, 17, 18]


async def test_a_turn_cut_at_its_limit_is_closed_once_and_as_context():
    engine = FakeEngine([reply([41, 41], reason=FinishReason.LENGTH), reply([41, 91])])
    session = make_session(engine, ChatML(ToyTok()), max_tokens=2)
    first = await session.chat([user("y")])
    assert first.finish_reason is FinishReason.LENGTH
    await session.chat([user("y"), first.message, tool("z")])
    assert engine.requests[1].prompt_ids.tolist()[7:11] == [41, 41, 91, 10]
    assert [turn.sampled.ids.tolist() for turn in session.turns] == [[41, 41], [41, 91]]
    columns = EpisodeTree(session.turns).columns(session.turns[1])
    assert (columns.ids[9], bool(columns.trainable[9])) == (91, False) and np.isnan(columns.logprobs[9])


async def test_thinking_that_a_client_drops_stays_in_the_tokens():
    engine = FakeEngine([reply([50, 60, 51, 61, 91]), reply([50, 62, 51, 63, 91])])
    session = make_session(engine, ChatML(ToyTok()))
    first = await session.chat([user("y")])
    assert (first.message.reasoning, first.message.content) == ("h", "s")
    await session.chat([user("y"), Message(role="assistant", content="s"), user("n")])
    assert engine.requests[1].prompt_ids.tolist()[7:] == [50, 60, 51, 61, 91, 10, 90, 1, 41, 91, 10, 90, 2]
    assert session.num_forks == 0
    assert EpisodeTree(session.turns).columns(session.turns[1]).num_trainable == 10


BYTES = ByteTokenizer()
END = BYTES.special("<|im_end|>")


def scripted(*answers: str) -> ScriptedEngine:
    return ScriptedEngine(
        lambda request: [*BYTES.encode(answers[min(request.key.turn, len(answers) - 1)]), END],
        token_bytes=BYTES.token_bytes(),
        policy_version=3,
    )


HERMES = '<tool_call>\n{"name": "bash", "arguments": {"command":"ls",  "n": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    "echo",
    [
        ToolCall(id="call-0-0", name="bash", arguments={"command": "ls", "n": 1}),
        ToolCall(id="other", name="bash", arguments={"n": 1, "command": "ls"}),
    ],
    ids=["as it came", "other id and key order"],
)
async def test_an_echo_in_other_json_continues_the_turn(echo: ToolCall):
    session = make_session(scripted(HERMES, "done"), ChatML(BYTES, "hermes"), max_tokens=200)
    await session.chat([user("u")])
    await session.chat([user("u"), Message(role="assistant", tool_calls=(echo,)), tool("ok")])
    assert [turn.parent for turn in session.turns] == [-1, 0]
    assert session.num_forks == 0


async def test_a_call_that_was_cut_at_the_limit_is_no_call_and_is_counted():
    session = make_session(scripted("$ rm -rf /tmp/x"), ChatML(BYTES), max_tokens=8)
    first = await session.chat([user("u")])
    assert (first.message.tool_calls, first.message.content, first.malformed) == ((), "$ rm -rf", True)
    await session.chat([user("u"), first.message, tool("cut")])
    assert [turn.parent for turn in session.turns] == [-1, 0], "its echo continues it"
    assert session.num_cut_calls == 2


async def test_a_whole_call_in_a_turn_that_was_cut_behind_it_is_one():
    session = make_session(scripted(HERMES + "<tool_call>" + "x" * 99), ChatML(BYTES, "hermes"), max_tokens=110)
    reply = await session.chat([user("u")])
    assert [call.name for call in reply.message.tool_calls] == ["bash"] and reply.cut and session.num_cut_calls == 1


ECHOES = {
    "space around what the assistant said": ("assistant", "one", " one\n", True),
    "space within what the assistant said": ("assistant", "one two", "one  two", False),
    "space at the end of a question": ("user", "u", "u ", False),
    "the indentation of a tool's output": ("tool", "  x: 1", "x: 1", False),
    "a line break in the instructions": ("system", "be brief\n", "be brief", False),
}


@pytest.mark.parametrize("name", ECHOES)
async def test_an_edit_of_space_forks_unless_nothing_that_the_model_reads_changes(name: str):
    role, said, echoed, same = ECHOES[name]
    session = make_session(scripted("one two" if said == "one two" else "one", "2"), ChatML(BYTES))
    before = [] if role == "assistant" else [Message(role=role, content=said)]
    first = await session.chat([*before, user("v")])
    edited = [] if role == "assistant" else [Message(role=role, content=echoed)]
    answer = Message(role="assistant", content=echoed) if role == "assistant" else first.message
    await session.chat([*edited, user("v"), answer, user("w")])
    assert [turn.parent for turn in session.turns] == [-1, 0 if same else -1]
    assert session.num_forks == (0 if same else 1)


async def test_a_history_that_was_rewritten_forks_and_is_counted():
    session = make_session(scripted("one", "two"), ChatML(BYTES))
    await session.chat([user("u")])
    await session.chat([user("u"), Message(role="assistant", content="on"), user("v")])
    assert [turn.parent for turn in session.turns] == [-1, -1]
    assert session.num_forks == 1
    assert session.turns[0].sampled.num_trainable == 4, "what was sampled stays as it was sampled"
    assert session.turns[1].context.num_trainable == 0


async def test_tools_that_change_are_seen_by_the_model():
    engine = scripted("one", "two")
    session = make_session(engine, ChatML(BYTES, "hermes"), max_context=4000)
    tools = [{"type": "function", "function": {"name": name}} for name in ("bash", "browse")]
    first = await session.chat([user("u")], tools[:1])
    await session.chat([user("u"), first.message, user("v")], tools)
    assert "browse" in BYTES.decode(EpisodeTree(session.turns).prompt_ids(session.turns[1]).tolist())


async def test_the_same_question_again_is_a_second_answer_beside_the_first():
    session = make_session(scripted("one", "two", "three"), ChatML(BYTES))
    first = await session.chat([user("u")])
    await session.chat([user("u")])
    await session.chat([user("u"), first.message, user("v")])
    assert [turn.parent for turn in session.turns] == [-1, -1, 0]
    assert session.num_forks == 0


async def test_a_history_of_several_turns_continues_its_last_one():
    session = make_session(scripted("same"), ChatML(BYTES))
    spoken = [user("u")]
    for _ in range(4):
        spoken += [(await session.chat(spoken)).message, user("u")]
    assert [turn.parent for turn in session.turns] == [-1, 0, 1, 2]


# Requests ------------------------------------------------------------------------------------------------------------


async def test_a_request_is_shortened_to_what_the_context_has_left():
    engine = FakeEngine([reply([5])])
    session = make_session(engine, BareRenderer(), max_tokens=200, max_context=1000)
    await session.chat([user("p" * 900)])
    assert len(engine.requests[0].prompt_ids) == 900 and engine.requests[0].params.max_tokens == 100


@pytest.mark.parametrize("length, fits", [(999, True), (1000, False), (5000, False)])
async def test_a_prompt_that_leaves_no_token_is_context_full(length: int, fits: bool):
    engine = FakeEngine([reply([5])])
    session = make_session(engine, BareRenderer(), max_context=1000)
    if fits:
        await session.chat([user("p" * length)])
        assert session.refusal is None
    else:
        with pytest.raises(ContextFull, match=str(length)):
            await session.chat([user("p" * length)])
        assert isinstance(session.refusal, ContextFull)
    assert len(engine.requests) == fits


async def test_sampling_comes_from_the_run_and_its_randomness_from_the_episode_and_turn():
    engine = FakeEngine([reply([5]), reply([5])])
    session = make_session(engine, BareRenderer(), max_tokens=9)
    await session.chat([user("p")])
    await session.chat([user("r")])
    first, second = engine.requests
    assert first.params == second.params == SamplingParams(max_tokens=9)
    assert (first.key.run_seed, first.key.episode, first.key.turn) == (7, "train-000004-002", 0)
    assert (second.key.turn, second.request_id) == (1, "train-000004-002.1.1")


async def test_an_empty_chat_is_refused_and_changes_nothing():
    session = make_session(FakeEngine([]), BareRenderer())
    with pytest.raises(ValueError, match="at least one message"):
        await session.chat([])
    assert session.refusal is None


async def test_a_session_makes_no_more_calls_than_it_may():
    engine = FakeEngine([reply([5])] * 3)
    session = make_session(engine, BareRenderer(), max_turns=2)
    await session.chat([user("p")])
    await session.chat([user("p")])
    with pytest.raises(TurnLimit, match="2"):
        await session.chat([user("p")])
    assert len(engine.requests) == 2


# Accounts ------------------------------------------------------------------------------------------------------------


async def test_a_turn_reaches_the_journal_before_the_agent_sees_it():
    written = asyncio.Event()
    journal = Journal(write=written.wait)
    session = make_session(FakeEngine([reply([5, 6])]), BareRenderer(), journal)
    call = asyncio.create_task(session.chat([user("p")]))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not call.done() and session.turns == ()
    written.set()
    assert (await call).turn == 0
    assert journal.facts == [("turn 0", 2)]


def forged(**streams: np.ndarray) -> Answer:
    """Columns that no constructor would make."""

    def answer(request: GenerateRequest) -> GenerateReply:
        honest = reply([5, 6])(request)
        for name, values in streams.items():
            object.__setattr__(honest.columns, name, values)
        return honest

    return answer


def nan(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


LIES: dict[str, tuple[Answer, str]] = {
    "an id beyond the vocabulary": (reply([5, 92]), "92"),
    "a negative id": (reply([-1, 5]), "-1"),
    "a missing logprob": (forged(logprobs=nan(-0.1)), "length"),
    "a logprob that is none": (forged(logprobs=nan(-0.1, np.nan)), "logprobs"),
    "a positive logprob": (forged(logprobs=nan(-0.1, 0.5)), "logprobs"),
    "tokens that were not sampled": (forged(sampled=np.array([True, False])), "not sampled"),
    "no policy version": (forged(versions=np.full(2, -1, np.int32)), "version"),
    "no temperature": (forged(temperatures=nan(np.nan, np.nan)), "temperature"),
    "another request": (lambda r: msgspec.structs.replace(reply([5, 6])(r), request_id="other"), "other"),
    "more than was asked": (reply([5] * 65), "65"),
    "fewer ids than it reported": (lambda r: msgspec.structs.replace(reply([5, 6])(r), num_reported=3), "reported 3"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_reply_that_cannot_be_is_refused_and_its_tokens_are_discarded(lie: str):
    answer, word = LIES[lie]
    journal = Journal()
    session = make_session(FakeEngine([answer, reply([5])]), BareRenderer(), journal)
    with pytest.raises(EngineError, match=word):
        await session.chat([user("p")])
    num_tokens = 65 if lie == "more than was asked" else 2
    assert journal.facts == [("refused", num_tokens)]
    assert (session.num_discarded, session.turns) == (num_tokens, ())
    await session.chat([user("p")])
    assert [turn.sampled.ids.tolist() for turn in session.turns] == [[5]], "the session goes on"


async def test_a_retry_starts_every_stream_anew():
    cut = reply([5, 6, 7], [-0.1, -0.2, -0.3])
    aborted = lambda request: msgspec.structs.replace(cut(request), finish_reason=FinishReason.ABORT)  # noqa: E731
    session = make_session(FakeEngine([aborted, reply([8, 9], [-0.4, -0.5])]), BareRenderer())
    with pytest.raises(RequestAborted):
        await session.chat([user("p")])
    await session.chat([user("p")])
    (turn,) = session.turns
    assert [len(getattr(turn.sampled, stream)) for stream in (*STREAMS, "kept")] == [2] * (len(STREAMS) + 1)
    assert turn.sampled.logprobs.tolist() == pytest.approx([-0.4, -0.5])
    assert session.num_discarded == 3


async def test_a_reply_without_tokens_is_an_engine_failure():
    session = make_session(FakeEngine([reply([])]), BareRenderer())
    with pytest.raises(EngineError, match="sampled nothing"):
        await session.chat([user("p")])


async def test_a_request_the_engine_calls_impossible_is_an_engine_failure():
    engine = ScriptedEngine(lambda request: [5], token_bytes=ToyTok().token_bytes(), max_context=10, policy_version=3)
    session = make_session(engine, BareRenderer(), max_context=1000)
    with pytest.raises(EngineError, match="context of 10"):
        await session.chat([user("p" * 50)])


async def test_an_aborted_turn_is_discarded():
    journal = Journal()
    session = make_session(FakeEngine([reply([5, 6, 5], reason=FinishReason.ABORT)]), BareRenderer(), journal)
    with pytest.raises(RequestAborted, match="3 tokens"):
        await session.chat([user("p")])
    assert journal.facts == [("aborted", 3)] and session.num_discarded == 3


async def test_what_a_cancelled_call_had_sampled_is_discarded_not_lost():
    journal, engine = Journal(), FakeEngine([reply([5, 6, 5], reason=FinishReason.ABORT), reply([6])], held=True)
    session = make_session(engine, BareRenderer(), journal)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await session.chat([user("p")])
    assert journal.facts == [("aborted", 3)] and session.num_discarded == 3
    await session.chat([user("p")])
    assert journal.facts[1:] == [("turn 0", 1)]


async def test_a_call_cancelled_before_it_began_still_reaches_the_engine_in_order():
    journal, engine = Journal(), FakeEngine([reply([5], reason=FinishReason.ABORT)], held=True)
    session = make_session(engine, BareRenderer(), journal)
    call = asyncio.create_task(session.chat([user("p")]))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert len(engine.requests) == 1 and engine.aborted.is_set()
    assert journal.facts == [("aborted", 1)]


async def test_an_engine_that_ignores_the_abort_is_not_waited_for_longer_than_the_grace(monkeypatch):
    monkeypatch.setattr("everlong.rollouts.gateway.session.ABORT_GRACE_S", 0.01)
    engine = FakeEngine([reply([5])], held=True)
    engine.abort = lambda request_ids: asyncio.sleep(3600)
    journal = Journal()
    session = make_session(engine, BareRenderer(), journal)
    call = asyncio.create_task(session.chat([user("p")]))
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(call, 10)
    assert session.turns == () and not session.lock.locked()
    assert journal.facts == [("uncounted, engine_silent", 64)], "nobody knows how many, and that is said"
    assert (session.num_uncounted, session.num_discarded) == (1, 0)


@pytest.mark.parametrize("cancelled", [False, True], ids=["while it is awaited", "while it is cancelled"])
async def test_a_call_whose_engine_breaks_is_told_as_uncounted(cancelled: bool):
    def breaks(request: GenerateRequest) -> GenerateReply:
        raise EngineError("the engine broke in a step")

    journal = Journal()
    session = make_session(FakeEngine([breaks], held=cancelled), BareRenderer(), journal)
    call = asyncio.create_task(session.chat([user("p")]))
    for _ in range(5):
        await asyncio.sleep(0)
    if cancelled:
        call.cancel()
    with pytest.raises(asyncio.CancelledError if cancelled else EngineError):
        await call
    assert journal.facts == [("uncounted, engine_failure", 64)] and session.num_uncounted == 1


@pytest.mark.parametrize("error", [ValueError("too long"), StaleWeights("pull 3 first")], ids=["refused", "stale"])
async def test_a_request_that_never_ran_leaves_nothing_uncounted(error: Exception):
    def refuses(request: GenerateRequest) -> GenerateReply:
        raise error

    journal = Journal()
    with pytest.raises(EngineError):
        await make_session(FakeEngine([refuses]), BareRenderer(), journal).chat([user("p")])
    assert journal.facts == []


async def test_a_cancellation_while_the_journal_writes_leaves_tree_and_journal_agreeing():
    written = asyncio.Event()
    journal = Journal(write=written.wait)
    session = make_session(FakeEngine([reply([5, 6])]), BareRenderer(), journal)
    call = asyncio.create_task(session.chat([user("p")]))
    for _ in range(20):
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.sleep(0)
    call.cancel()
    written.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert journal.facts == [("turn 0", 2)] and len(session.turns) == 1


async def test_closing_ends_a_call_in_flight_and_accounts_for_it():
    journal, engine = Journal(), FakeEngine([reply([5, 6], reason=FinishReason.ABORT)], held=True)
    session = make_session(engine, BareRenderer(), journal)
    calls = [asyncio.create_task(session.chat([user("p")])) for _ in range(2)]
    await asyncio.sleep(0.01)
    await session.close()
    assert journal.facts == [("aborted", 2)]
    assert [type(error) for error in await asyncio.gather(*calls, return_exceptions=True)] == [SessionClosed] * 2
    assert len(engine.requests) == 1
    await session.close()


async def test_a_worker_that_died_is_no_engine_error():
    def die(request: GenerateRequest) -> GenerateReply:
        raise WorkerDied("gone")

    session = make_session(FakeEngine([die]), BareRenderer())
    with pytest.raises(WorkerDied):
        await session.chat([user("p")])
    assert isinstance(session.refusal, WorkerDied)


async def test_turns_of_one_session_never_overlap():
    engine = scripted("one", "two")
    engine.inject(Fault.STALL)
    session = make_session(engine, ChatML(BYTES))
    calls = [asyncio.create_task(session.chat([user("u")])) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert (await engine.status()).num_running == 1
    engine.resume()
    assert [answer.turn for answer in await asyncio.gather(*calls)] == [0, 1]


async def test_turns_keep_every_id_and_logprob_on_the_wire():
    session = make_session(scripted("$ ls", "é done"), ChatML(BYTES))
    first = await session.chat([user("u")])
    await session.chat([user("u"), first.message, tool("a\0b 🦊")])
    for turn in session.turns:
        again = decode_record(encode_record(turn), Turn)
        assert again.context == turn.context and again.sampled == turn.sampled
        assert (again.parent, again.request_id, again.finish_reason) == (
            turn.parent,
            turn.request_id,
            turn.finish_reason,
        )
