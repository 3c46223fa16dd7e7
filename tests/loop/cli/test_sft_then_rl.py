"""A supervised run whose checkpoint starts another run, on the toy; it takes some seconds."""

import json
from pathlib import Path

import numpy as np
import pytest

from everlong.cli.evaluate import eval_command
from everlong.cli.run_folder import RunFolder
from everlong.cli.train import sft_command, train_command
from everlong.environments.tasks.terminal.generate import Split, make_terminal
from everlong.ledger import Ledger
from everlong.models.checkpoint import load_checkpoint
from everlong.orchestrator.recovery import progress_of
from everlong.storage import open_store
from everlong.weights import WeightReader


def settings(folder: Path, output: str) -> list[str]:
    make = {"train": (Split.TRAIN, 4), "eval": (Split.EVAL, 2)}
    for name, (split, count) in make.items():
        if not (folder / name).exists():
            make_terminal(folder / name, count, seed=0, split=split, kinds=("write-word",))
    (folder / "run.toml").write_text(
        f"""
        threads = 1
        worker = "inline"
        output = "{folder / output}"
        tasks = {{ train = ["{folder / "train"}"], eval = ["{folder / "eval"}"] }}
        harness = {{ max_turns = 2, max_context = 512, system_prompt = "" }}
        sampling = {{ max_tokens = 8 }}
        warmup = {{ num_batches = 2, traces_per_batch = 4 }}
        schedule = {{ num_batches = 1, groups_per_batch = 1, group_size = 2 }}
        observe = {{ progress = "none" }}
        """
    )
    return ["@", str(folder / "run.toml")]


def batches_of(folder: RunFolder) -> int:
    ledger = Ledger.open(folder.ledger)
    try:
        assert ledger.lifecycle.finished
        return progress_of(ledger.lifecycle).num_batches
    finally:
        ledger.close()


def test_a_supervised_runs_checkpoint_starts_another_run(tmp_path: Path):
    sft_command(settings(tmp_path, "warm"))
    warm = RunFolder(tmp_path / "warm")
    assert batches_of(warm) == 2, "the RL batch of the file is left out"
    assert sorted(path.name for path in warm.checkpoint.iterdir()) == [
        "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    start = [
        "--model.type",
        "folder",
        "--model.path",
        str(warm.checkpoint),
        "--warmup.num-batches",
        "0",
        "--warmup.traces-per-batch",
        "32",
    ]
    train_command([*settings(tmp_path, "rl"), *start, "--admission.zero-signal", "keep"])
    rl = RunFolder(tmp_path / "rl")
    assert batches_of(rl) == 1
    evals = [json.loads(line) for line in rl.metrics.read_text().splitlines() if '"eval"' in line]
    assert [line["values"]["episodes"] for line in evals] == [2, 2]


LORA = ["--adapter.type", "lora", "--adapter.rank", "4"]


def test_adapters_warm_up_and_start_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A merged checkpoint is the frozen base of the next run's adapters, in a worker of its own; versions stay small."""
    sft_command([*settings(tmp_path, "warm"), *LORA])
    warm = RunFolder(tmp_path / "warm")
    assert {"adapter", "model.safetensors"} <= {path.name for path in warm.checkpoint.iterdir()}
    assert json.loads((warm.adapter / "adapter_config.json").read_text())["base_model_name_or_path"] is None
    start = ["--model.type", "folder", "--model.path", str(warm.checkpoint), "--warmup.num-batches", "0"]
    command = [*settings(tmp_path, "rl"), *LORA, *start, "--worker", "process", "--admission.zero-signal", "keep"]
    train_command(command)
    rl = RunFolder(tmp_path / "rl")
    assert str(rl.adapter) in "".join(capsys.readouterr().err.split())
    config = json.loads((rl.adapter / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"]) == (str(warm.checkpoint), 4)
    reader = WeightReader(open_store(rl.store_url(rl.read_config())))
    first, second = reader.read(0), reader.read(1)
    base = load_checkpoint(warm.checkpoint)
    for name, weight in base.named_weights().items():
        assert np.array_equal(first.frozen[name].bits.view(np.float32), weight.detach().numpy())
        assert np.array_equal(second.frozen[name].bits, first.frozen[name].bits)
    lines = [json.loads(line) for line in rl.metrics.read_text().splitlines() if "delta/size_bytes" in line]
    assert lines[-1]["values"]["delta/size_bytes"] < 4.5 * second.num_values
    eval_command(rl.path, (), 1, 1, tmp_path / "figures.json")
    assert json.loads((tmp_path / "figures.json").read_text())["version"] == 1


def test_an_exported_toy_is_read_by_transformers(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    sft_command([*settings(tmp_path, "warm"), "--warmup.num-batches", "1"])
    folder = tmp_path / "warm" / "checkpoint"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "é"}], add_generation_prompt=True)
    assert prompt["input_ids"] == [257, *b"user\n\xc3\xa9", 258, *b"\n", 257, *b"assistant\n"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.get_input_embeddings().weight.shape == (264, 128)
