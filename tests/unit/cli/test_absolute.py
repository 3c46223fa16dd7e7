"""Which folder a run was started from does not change what its saved config means."""

from pathlib import Path

import pytest

from everlong.cli.absolute import absolute_paths
from everlong.cli.config import RunConfig
from everlong.contracts.config import Config


def relative_paths(config: Config) -> list[str]:
    found = []
    for name in type(config).model_fields:
        value = getattr(config, name)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Config):
                found += [f"{name}.{rest}" for rest in relative_paths(each)]
            elif isinstance(each, Path) and not each.is_absolute():
                found.append(name)
    return found


RELATIVE = {
    "output": "out",
    "tasks": {"train": ["a", "b"], "eval": "c"},
    "model": {"type": "folder", "path": "model"},
    "sandbox": {"root": "boxes"},
    "engine": {"type": "vllm", "python": "venv/bin/python"},
    "weights": {"store": "store"},
}


POOL = {"type": "pool", "members": [{"type": "embedded"}, RELATIVE["engine"]]}


@pytest.mark.parametrize("engine", [RELATIVE["engine"], POOL], ids=["one engine", "pool"])
def test_every_path_of_a_config_becomes_absolute(engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = RunConfig.model_validate({**RELATIVE, "engine": engine})
    assert len(relative_paths(config)) == 7, "a path that this test knows nothing of would be lost here"
    found = absolute_paths(config)
    assert relative_paths(found) == []
    assert found.tasks.train == (tmp_path / "a", tmp_path / "b")
    assert found.weights.store == str(tmp_path / "store")
    assert absolute_paths(found) == found


def test_the_url_of_a_store_and_a_link_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    config = RunConfig.model_validate({"sandbox": {"root": "link"}, "weights": {"store": "s3://bucket/path"}})
    found = absolute_paths(config)
    assert (found.sandbox.root, found.weights.store) == (tmp_path / "link", "s3://bucket/path")
