"""The peers' environment and the prompts that both sides get."""

import sys
from pathlib import Path

import pytest

from everlong.cli.benches.peers.environment import CONSTRAINTS, PACKAGES, peers_folder, peers_python
from everlong.cli.benches.peers.process import Peer
from everlong.cli.benches.prompts import Windows
from everlong.rollouts.renderers.tokenizers import ByteTokenizer


@pytest.fixture
def bare_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that says it is complete, whose interpreter has no packages."""
    monkeypatch.setenv("EVERLONG_PEERS", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    (tmp_path / "constraints.txt").write_text(CONSTRAINTS.read_text())
    return tmp_path


def test_every_package_of_the_peers_is_pinned():
    pinned = {line.split("==")[0].lower() for line in CONSTRAINTS.read_text().splitlines() if "==" in line}
    assert set(PACKAGES) <= pinned


def test_the_environment_is_in_the_cache_unless_another_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("EVERLONG_CACHE", str(tmp_path))
    monkeypatch.delenv("EVERLONG_PEERS", raising=False)
    assert peers_folder() == tmp_path / "peers"
    monkeypatch.setenv("EVERLONG_PEERS", str(tmp_path / "mine"))
    assert peers_folder() == tmp_path / "mine"


def test_an_environment_with_these_pins_is_used_as_it_is(bare_environment: Path):
    assert peers_python() == bare_environment / "bin" / "python"


@pytest.mark.usefixtures("bare_environment")
def test_a_peer_that_ends_says_why():
    with pytest.raises(ChildProcessError, match="the peer generate ended with code 1:[\\s\\S]*No module named 'torch'"):
        Peer("generate", {"model": "nowhere", "prompt": []}, threads=1)


def test_prompts_are_new_and_are_encoded_as_themselves():
    tokenizer = ByteTokenizer()
    windows = Windows(tokenizer)
    prompts = [windows.take(50) for _ in range(20)]
    assert all(tokenizer.encode(tokenizer.decode(prompt)) == prompt and len(prompt) == 50 for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts}) == 20
    assert windows.take(0) == []


def test_asking_for_more_text_than_there_is_fails():
    with pytest.raises(ValueError, match="fewer or shorter prompts"):
        Windows(ByteTokenizer()).take(10**8)
