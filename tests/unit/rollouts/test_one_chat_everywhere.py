"""One conversation has the same ids wherever it is told: training, evaluation, imitation and scoring."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from everlong.cli.beside import NoAccount
from everlong.contracts.ports import Command, ExecResult
from everlong.contracts.records import EpisodeOrder, Purpose, SamplingParams, ScoredGroup
from everlong.engines.scripted import ScriptedEngine
from everlong.environments.sandboxes.scripted import ScriptedBackend, ScriptedSandbox, interpret
from everlong.environments.tasks.harbor import read_task
from everlong.environments.tasks.terminal.generate import make_terminal
from everlong.rollouts.config import HarnessConfig
from everlong.rollouts.gateway.session import SessionLimits
from everlong.rollouts.harnesses.bash import BashHarness
from everlong.rollouts.oracle import FINAL_ANSWER, oracle_trace
from everlong.rollouts.renderers.chatml import ChatML
from everlong.rollouts.renderers.tokenizers import FileTokenizer
from everlong.rollouts.runner import EpisodeRunner, Sampling
from everlong.trajectories.admission import AdmissionConfig
from everlong.trajectories.packing import PackingConfig, pack_batch
from everlong.trajectories.tree import EpisodeTree


def graded(sandbox: ScriptedSandbox, command: Command) -> ExecResult:
    if command.argv != ("bash", "/tests/test.sh"):
        return interpret(sandbox, command)
    sandbox.files["/logs/verifier/reward.txt"] = b"1"
    return ExecResult(exit_code=0, output=b"")


async def test_every_path_gives_a_chat_the_same_ids_without_the_tokenizers_own_bos(bpe_file: Path, tmp_path: Path):
    tokenizer = FileTokenizer(bpe_file)
    bos = tokenizer.special("<|bos|>")
    assert Tokenizer.from_file(str(bpe_file)).encode("fox").ids[0] == bos, "it would add one"
    task = read_task(make_terminal(tmp_path / "tasks", 1)[0])
    renderer, harness, backend = ChatML(tokenizer), BashHarness(HarnessConfig()), ScriptedBackend(graded)
    said = [[*tokenizer.encode(text), renderer.stop_ids[0]] for text in ("$ echo fox", FINAL_ANSWER)]
    runner = EpisodeRunner(
        tasks={task.id: task},
        backend=backend,
        harness=harness,
        sampling=Sampling(
            engine=ScriptedEngine(
                lambda request: said[request.key.turn], token_bytes=tokenizer.token_bytes(), policy_version=0
            ),
            renderer=renderer,
            params=SamplingParams(max_tokens=64, stop_ids=renderer.stop_ids),
            run_seed=0,
            limits=SessionLimits(max_turns=4, max_context=4096),
        ),
        journal=NoAccount(),
    )
    train, held_out = [
        await runner.run(EpisodeOrder(task=task.id, group=0, attempt=0, purpose=purpose)) for purpose in Purpose
    ]
    trace = await oracle_trace(task, ["echo fox"], renderer=renderer, harness=harness, backend=backend)
    group = ScoredGroup(group=0, task=task.id, episodes=(train,), credits=(1.0,))
    (scored,) = pack_batch(0, [group], PackingConfig(), AdmissionConfig(), 0).train_batch.micro_batches
    ids = trace.ids.tolist()
    assert ids.count(bos) == 0 and ids.count(tokenizer.special("<|im_start|>")) >= 4
    for episode in (train, held_out):
        assert EpisodeTree(episode.turns).columns(episode.turns[-1]).ids.tolist() == ids
    assert scored.columns.ids.tolist() == ids
