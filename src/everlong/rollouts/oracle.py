"""Oracle traces: the task's own solution, played turn by turn through the harness that the policy uses.

The engine is replaced by one that says the oracle's commands, so the tokens are those a policy would have seen and
would have to sample: same renderer, same harness text, same sandbox. The answers become trainable, not sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from everlong.contracts.errors import Reason
from everlong.contracts.ports import SandboxBackend
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
from everlong.environments.tasks.harbor import HarborTask
from everlong.environments.tasks.opening import open_task
from everlong.rollouts.gateway.session import Session, SessionLimits
from everlong.rollouts.leash import contained
from everlong.rollouts.messages import Message, ToolCall
from everlong.rollouts.renderers.chatml import Renderer
from everlong.rollouts.runner import Harness
from everlong.trajectories.tree import EpisodeTree

FINAL_ANSWER = "done"


class OracleEngine:
    """Says the commands in order, then the final answer."""

    def __init__(self, commands: Sequence[str], renderer: Renderer) -> None:
        said = [Message(role="assistant", tool_calls=(_bash(command),)) for command in commands]
        answers = [*said, Message(role="assistant", content=FINAL_ANSWER)]
        self._answers = [renderer.answer(message) for message in answers]

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        ids = self._answers[request.key.turn]
        columns = TokenColumns.sampled_tokens(ids, np.zeros(len(ids), np.float32), version=0)
        return GenerateReply(request_id=request.request_id, columns=columns, finish_reason=FinishReason.STOP)

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        """Nothing waits here."""

    async def update(self, policy_version: int) -> EngineStatus:
        return await self.status()

    async def status(self) -> EngineStatus:
        return EngineStatus(policy_version=0, fingerprint="oracle")

    async def close(self) -> None:
        """Nothing to close."""


class _NoJournal:
    async def turn_sampled(self, order: EpisodeOrder, turn: int, num_tokens: int) -> None:
        """Nobody sampled: there is nothing to account for."""

    async def tokens_discarded(self, order: EpisodeOrder, num_tokens: int, reason: str) -> None:
        """Nobody sampled: there is nothing to account for."""

    async def call_uncounted(self, order: EpisodeOrder, max_tokens: int, reason: str) -> None:
        """Nobody sampled: there is nothing to account for."""


async def oracle_trace(
    task: HarborTask,
    commands: Sequence[str],
    *,
    renderer: Renderer,
    harness: Harness,
    backend: SandboxBackend,
    ttl_s: float | None = None,
) -> TokenColumns:
    """The whole conversation as tokens: the oracle's answers are trainable, everything else is context.

    `ttl_s`: after which the sandbox is closed, whatever happens. Raises SandboxError, and ValueError when the harness ends otherwise than by the oracle's final answer.
    """
    order = EpisodeOrder(task=task.id, group=0, attempt=0, purpose=Purpose.TRAIN)
    session = Session(
        order,
        engine=OracleEngine(commands, renderer),
        renderer=renderer,
        params=SamplingParams(max_tokens=1 << 20),
        run_seed=0,
        limits=SessionLimits(max_turns=len(commands) + 1, max_context=1 << 30),
        journal=_NoJournal(),
    )
    sandbox = await open_task(task, backend, f"oracle-{task.task.content_hash[:16]}", ttl_s=ttl_s)
    try:
        reason = await contained(
            lambda: harness.run(task.task, session, sandbox), f"the harness with the oracle of {task.id}"
        )
    finally:
        await sandbox.close()
    if reason is not Reason.DONE or len(session.turns) != len(commands) + 1:
        raise ValueError(f"the oracle of task {task.id} ended with {reason} after {len(session.turns)} turns")
    columns = EpisodeTree(session.turns).columns(session.turns[-1])
    return TokenColumns.context(columns.ids).replace(trainable=columns.sampled)


def _bash(command: str) -> ToolCall:
    return ToolCall(name="bash", arguments={"command": command})
