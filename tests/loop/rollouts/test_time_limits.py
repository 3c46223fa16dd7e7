"""A limit that cuts an agent off is never a clean finish, whatever stands behind the command in its pipe."""

import msgspec
import pytest

from everlong.cli.beside import NoAccount
from everlong.contracts.errors import Reason
from everlong.contracts.records import EpisodeOrder, Purpose, SamplingParams
from everlong.engines.scripted import ScriptedEngine
from everlong.environments.sandboxes.local import LocalBackend
from everlong.environments.tasks.harbor import read_task
from everlong.environments.tasks.terminal.generate import make_terminal
from everlong.rollouts.config import HarnessConfig
from everlong.rollouts.gateway.session import SessionLimits
from everlong.rollouts.harnesses.bash import BashHarness
from everlong.rollouts.renderers.chatml import ChatML
from everlong.rollouts.renderers.tokenizers import ByteTokenizer
from everlong.rollouts.runner import EpisodeRunner, Sampling
from everlong.trajectories.tree import EpisodeTree

BYTES = ByteTokenizer()


@pytest.fixture
async def play(tmp_path):
    """An episode on a real sandbox whose agent says these turns, within `agent_s`; each takes a second or two."""
    backend = LocalBackend(tmp_path / "boxes", isolation="none")
    folder = make_terminal(tmp_path / "tasks", 1, kinds=("write-word",))[0]

    async def run(*said, agent_s=30.0, command_s=30.0):
        task = read_task(folder)
        task = msgspec.structs.replace(task, task=msgspec.structs.replace(task.task, agent_timeout_s=agent_s))
        renderer = ChatML(BYTES)
        engine = ScriptedEngine(
            lambda request: [*BYTES.encode(said[request.key.turn]), *renderer.stop_ids],
            token_bytes=BYTES.token_bytes(),
            policy_version=0,
        )
        runner = EpisodeRunner(
            tasks={task.id: task},
            backend=backend,
            harness=BashHarness(HarnessConfig(command_timeout_s=command_s)),
            sampling=Sampling(
                engine=engine,
                renderer=renderer,
                params=SamplingParams(max_tokens=256, stop_ids=renderer.stop_ids),
                run_seed=0,
                limits=SessionLimits(max_turns=4, max_context=4096),
            ),
            journal=NoAccount(),
        )
        return await runner.run(EpisodeOrder(task=task.id, group=0, attempt=0, purpose=Purpose.TRAIN))

    yield run
    await backend.close()


async def test_an_agent_that_runs_out_of_time_behind_a_pipe_timed_out_and_did_not_finish(play):
    episode = await play("$ sleep 8642.5 | tee log", "done", agent_s=1.0)
    assert (episode.reason, len(episode.turns)) == (Reason.AGENT_TIMEOUT, 1)
    assert episode.reward == 0.0, "what it left behind was graded"


async def test_a_command_cut_at_its_limit_behind_a_pipe_is_told_as_killed(play):
    episode = await play("$ echo early; sleep 8642.5 | tee log", "done", command_s=1.0)
    assert episode.reason is Reason.DONE
    seen = BYTES.decode(EpisodeTree(episode.turns).prompt_ids(episode.turns[1]).tolist())
    assert "early\n[killed after 1 s]" in seen
