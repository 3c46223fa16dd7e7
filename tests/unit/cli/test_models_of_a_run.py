"""What a run's config makes of its model: renderer, context, companions of its checkpoint, the supervised part."""

import json
from pathlib import Path

import pytest

from everlong.cli.arguments import parse_config
from everlong.cli.config import RunConfig
from everlong.cli.rendering import checkpoint_companions, make_renderer
from everlong.cli.toml import read_config, write_config
from everlong.cli.train import supervised_only
from everlong.models.config import FolderModel, ScriptedModel, Smollm2Model, ToyModel
from everlong.models.source import find_model, toy_config
from everlong.orchestrator.config import WarmupConfig
from everlong.rollouts.messages import Message
from everlong.rollouts.renderers.tokenizers import ByteTokenizer, FileTokenizer


def exported_toy(folder: Path) -> Path:
    """A toy's checkpoint folder without its weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(toy_config().to_hf()))
    (folder / "model.safetensors").touch()
    for name, content in checkpoint_companions(find_model(ToyModel())).items():
        (folder / name).write_bytes(content)
    return folder


def test_a_checkpoint_of_the_toy_is_spoken_to_like_the_toy(tmp_path: Path):
    folder = exported_toy(tmp_path / "checkpoint")
    toy, file = make_renderer(RunConfig()), make_renderer(RunConfig(model=FolderModel(path=folder)))
    assert isinstance(toy.tokenizer, ByteTokenizer)
    assert isinstance(file.tokenizer, FileTokenizer)
    messages = [Message(role="system", content="Be brief. é"), Message(role="user", content="Say <|im_end|>.")]
    assert file.render(messages) == toy.render(messages)
    assert file.stop_ids == toy.stop_ids


def test_what_lay_beside_the_weights_goes_on_to_the_next_checkpoint(tmp_path: Path):
    folder = exported_toy(tmp_path / "checkpoint")
    assert checkpoint_companions(find_model(FolderModel(path=folder))) == checkpoint_companions(find_model(ToyModel()))


def test_no_system_message_is_added_where_none_was_given():
    renderer = make_renderer(RunConfig())
    ids = renderer.render([Message(role="user", content="Hi")])
    start, end = (renderer.tokenizer.special(name) for name in ("<|im_start|>", "<|im_end|>"))
    text = [*b"user\nHi"], [*b"\n"], [*b"assistant\n"]
    assert ids == [start, *text[0], end, *text[1], start, *text[2]]


def test_a_model_is_chosen_by_dotted_options_and_survives_the_file(tmp_path: Path):
    config = parse_config(["--model.type", "smollm2", "--model.dtype", "bfloat16"])
    assert config.model == Smollm2Model(dtype="bfloat16")
    write_config(config, tmp_path / "config.toml")
    assert read_config(tmp_path / "config.toml") == config
    config = parse_config(["--model.type", "folder", "--model.path", "runs/warm/checkpoint"])
    assert config.model == FolderModel(path=Path("runs/warm/checkpoint"), dtype="bfloat16")  # the quickstart's


def test_the_supervised_part_of_a_run_is_its_warm_up():
    config = RunConfig(warmup=WarmupConfig(num_batches=7))
    part = supervised_only(config)
    assert (part.warmup, part.schedule.num_batches) == (config.warmup, 0)
    assert part.model_copy(update={"schedule": config.schedule}) == config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RunConfig(), r"warmup\.num_batches is 0"),
        (RunConfig(warmup=WarmupConfig(num_batches=1), model=ScriptedModel()), "nothing to train"),
    ],
    ids=["no-batches", "scripted"],
)
def test_supervision_that_would_do_nothing_is_refused(config: RunConfig, message: str):
    with pytest.raises(ValueError, match=message):
        supervised_only(config)
