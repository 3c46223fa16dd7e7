"""Where a model comes from: a folder, the hub's cache, or code."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from everlong.models.config import FolderModel, HubModel, ModelConfig, ScriptedModel, ToyModel
from everlong.models.llama.config import LlamaConfig
from everlong.models.source import ModelSource, find_model, toy_config

SHAPE = LlamaConfig(
    vocab_size=20, padded_vocab_size=24, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=4, max_positions=77,
)  # fmt: skip
PARSE = TypeAdapter(ModelConfig).validate_python


def fill(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SHAPE.to_hf()))
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_folder_says_its_shape_and_what_lies_beside_the_weights(tmp_path: Path):
    folder = fill(tmp_path / "model")
    (folder / "generation_config.json").write_text("{}")
    source = find_model(FolderModel(path=folder))
    assert (source.shape, source.folder) == (SHAPE, folder)
    assert source.companions() == {"tokenizer.json": b"{}", "generation_config.json": b"{}"}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_that_a_folder_lacks_is_named(tmp_path: Path, name: str):
    (fill(tmp_path / "model") / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"found no {name} in"):
        find_model(FolderModel(path=tmp_path / "model"))


def test_models_built_by_code_have_no_folder():
    for config in (ToyModel(), ScriptedModel()):
        source = find_model(config)
        assert (source.shape, source.folder, source.companions()) == (toy_config(), None, {})


def test_a_hub_name_is_found_in_the_hubs_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The layout of huggingface_hub's cache: a reference names a commit, its snapshot holds the files."""
    constants = pytest.importorskip("huggingface_hub.constants")
    repository, commit = tmp_path / "models--someone--tiny", "a" * 40
    folder = fill(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_model(HubModel(repo="someone/tiny")).folder == folder
    assert find_model(HubModel(repo="someone/tiny", revision=commit)).shape == SHAPE
    with pytest.raises(FileNotFoundError, match=r"could not get someone/other at main .* model\.type=folder"):
        find_model(HubModel(repo="someone/other"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "toy", "path": "x"},
        {"type": "smollm2", "seed": 1},
        {"type": "folder"},
        {"type": "hub", "repo": "no-owner"},
        {"type": "scripted", "dtype": "bfloat16"},
    ],
    ids=["toy-path", "smollm2-seed", "folder-without-path", "hub-without-owner", "scripted-dtype"],
)
def test_a_setting_that_would_have_no_effect_is_refused(wrong: dict):
    with pytest.raises(ValidationError):
        PARSE(wrong)


def test_finding_a_model_loads_no_torch(tmp_path: Path):
    """The control process asks for the shape and has no torch."""
    folder = fill(tmp_path / "model")
    code = (
        "import sys; from everlong.models.config import FolderModel; from everlong.models.source import find_model; "
        f"find_model(FolderModel(path={str(folder)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def own_models(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("own_models")
    built = ModelSource(SHAPE, None, lambda shape, dtype, numerics: None)  # type: ignore[return-value]
    module.__dict__.update(
        built=lambda: built, nothing=lambda: None, nowhere=lambda: ModelSource(SHAPE, None), word="no"
    )
    monkeypatch.setitem(sys.modules, "own_models", module)


def test_a_model_of_ones_own_is_what_its_function_gives(own_models: None):
    source = find_model(PARSE({"type": "own", "source": "own_models:built"}))
    assert source.shape is SHAPE and source.folder is None and source.build is not None


@pytest.mark.parametrize("name", ["nothing", "nowhere", "word"])
def test_a_function_that_gives_no_model_is_refused(own_models: None, name: str):
    with pytest.raises(
        ValueError, match=f"model.source=own_models:{name} must name a function that returns a ModelSource"
    ):
        find_model(PARSE({"type": "own", "source": f"own_models:{name}"}))


def test_a_source_that_names_no_code_is_refused():
    with pytest.raises(ValidationError, match="should match pattern"):
        PARSE({"type": "own", "source": "my model"})
