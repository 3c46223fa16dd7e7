"""Sessions on prepared engines and small tokenizers: what the tests of sessions share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from everlong.contracts.records import (
    EngineStatus,
    EpisodeOrder,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Purpose,
    SamplingParams,
)
from everlong.contracts.tokens import TokenColumns
from everlong.engines.scripted import ScriptedEngine
from everlong.rollouts.gateway.session import Session, SessionLimits
from everlong.rollouts.messages import Message
from everlong.rollouts.renderers.chatml import ParsedTurn, Thinking
from everlong.rollouts.renderers.tokenizers import ByteTokenizer

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

    def parse(self, ids, turn, *, cut=False, calls=True):
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
    engine, renderer, journal: Journal | None = None, *, max_tokens=64, max_turns=8, max_context=1000, record=(), **more
):
    return Session(
        ORDER,
        engine=engine,
        renderer=renderer,
        params=SamplingParams(temperature=1.0, max_tokens=max_tokens, stop_ids=renderer.stop_ids, record=record),
        run_seed=7,
        limits=SessionLimits(max_turns=max_turns, max_context=max_context),
        journal=journal or Journal(),
        **more,
    )


def user(text: str) -> Message:
    return Message(role="user", content=text)


def tool(text: str) -> Message:
    return Message(role="tool", content=text)


BYTES = ByteTokenizer()
END = BYTES.special("<|im_end|>")


def scripted(*answers: str) -> ScriptedEngine:
    return ScriptedEngine(
        lambda request: [*BYTES.encode(answers[min(request.key.turn, len(answers) - 1)]), END],
        token_bytes=BYTES.token_bytes(),
        policy_version=3,
    )
