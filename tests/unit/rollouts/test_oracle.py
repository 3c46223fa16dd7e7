"""An oracle's trace is what a policy would have seen and would have to sample."""

from __future__ import annotations

import numpy as np
import pytest

from everlong.contracts.errors import SandboxError
from everlong.contracts.ports import ExecResult
from everlong.contracts.records import EpisodeOrder, Purpose, SamplingParams
from everlong.contracts.tokens import NO_VERSION
from everlong.engines.scripted import ScriptedEngine
from everlong.environments.sandboxes.scripted import ScriptedBackend
from everlong.environments.tasks.harbor import HarborTask, read_task
from everlong.environments.tasks.opening import open_task
from everlong.environments.tasks.terminal.generate import make_terminal
from everlong.rollouts.config import HarnessConfig
from everlong.rollouts.gateway.session import Session, SessionLimits
from everlong.rollouts.harnesses.bash import BashHarness
from everlong.rollouts.oracle import oracle_trace
from everlong.rollouts.renderers.chatml import ChatML, ToolSyntax
from everlong.rollouts.renderers.tokenizers import ByteTokenizer
from everlong.trajectories.tree import EpisodeTree

BYTES = ByteTokenizer()
END = BYTES.special("<|im_end|>")
COMMANDS = ["echo 'naïve' > out.txt", "cat out.txt\ncat no-such-file"]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> HarborTask:
    return read_task(make_terminal(tmp_path_factory.mktemp("tasks") / "one", 1)[0])


class Accounts:
    async def turn_sampled(self, order, turn, num_tokens) -> None: ...

    async def tokens_discarded(self, order, num_tokens, reason) -> None: ...

    async def call_uncounted(self, order, max_tokens, reason) -> None: ...


async def test_the_trainable_tokens_say_the_commands_and_the_end(task: HarborTask):
    trace = await oracle_trace(
        task, COMMANDS, renderer=ChatML(BYTES), harness=BashHarness(HarnessConfig()), backend=ScriptedBackend()
    )
    said = trace.ids[trace.trainable].tolist()
    assert said == [i for text in (f"$ {COMMANDS[0]}", f"$ {COMMANDS[1]}", "done") for i in (*BYTES.encode(text), END)]
    assert not trace.sampled.any() and np.isnan(trace.logprobs).all() and (trace.versions == NO_VERSION).all()
    assert "naïve\n" in BYTES.decode(trace.ids[~trace.trainable].tolist()), "what the commands printed is context"


@pytest.mark.parametrize("syntax", ["dollar", "hermes"])
async def test_a_policy_that_samples_the_oracle_has_the_same_tokens(syntax: ToolSyntax, task: HarborTask):
    renderer, harness, backend = ChatML(BYTES, syntax), BashHarness(HarnessConfig()), ScriptedBackend()
    trace = await oracle_trace(task, COMMANDS, renderer=renderer, harness=harness, backend=backend)
    ends = np.flatnonzero(trace.trainable & (trace.ids == END)).tolist()
    starts = [int(i) for i in np.flatnonzero(np.diff(trace.trainable.astype(int)) == 1) + 1]
    answers = [trace.ids[start : end + 1].tolist() for start, end in zip(starts, ends, strict=True)]
    session = Session(
        EpisodeOrder(task=task.id, group=0, attempt=0, purpose=Purpose.TRAIN),
        engine=ScriptedEngine(
            lambda request: answers[request.key.turn], token_bytes=BYTES.token_bytes(), policy_version=0
        ),
        renderer=renderer,
        params=SamplingParams(max_tokens=500, stop_ids=renderer.stop_ids),
        run_seed=0,
        limits=SessionLimits(max_turns=8, max_context=4096),
        journal=Accounts(),
    )
    sandbox = await open_task(task, backend, "policy")
    await harness.run(task.task, session, sandbox)
    columns = EpisodeTree(session.turns).columns(session.turns[-1])
    assert columns.ids.tolist() == trace.ids.tolist()
    assert columns.sampled.tolist() == trace.trainable.tolist()


async def test_an_oracle_that_ends_early_is_refused(task: HarborTask):
    with pytest.raises(ValueError, match="after 1 turns"):
        await oracle_trace(
            task,
            ["echo first", "echo never"],
            renderer=_FirstCommandIsText(BYTES),
            harness=BashHarness(HarnessConfig()),
            backend=ScriptedBackend(),
        )


async def test_an_oracle_leaves_no_sandbox_behind(task: HarborTask):
    backend = ScriptedBackend()
    harness = BashHarness(HarnessConfig())
    for _ in range(2):
        await oracle_trace(task, COMMANDS, renderer=ChatML(BYTES), harness=harness, backend=backend)
    assert not backend.sandboxes


async def test_an_oracle_that_outlasts_the_time_to_live_is_a_sandbox_error(task: HarborTask):
    backend = ScriptedBackend(lambda sandbox, command: ExecResult(exit_code=0, output=b"", elapsed_s=9.0))
    play = {"renderer": ChatML(BYTES), "harness": BashHarness(HarnessConfig()), "backend": backend}
    await oracle_trace(task, COMMANDS, **play, ttl_s=20.0)
    with pytest.raises(SandboxError, match="10"):
        await oracle_trace(task, COMMANDS, **play, ttl_s=10.0)
    assert not backend.sandboxes


class _FirstCommandIsText(ChatML):
    """A syntax in which calls cannot be told from text."""

    def parse(self, ids, turn, *, cut=False, calls=True):
        return super().parse([ord("x"), *ids], turn, cut=cut)
