from pathlib import Path

import pytest

from everlong.contracts.errors import SandboxError
from everlong.contracts.ports import SandboxSpec
from everlong.environments.tasks.harbor import read_task
from everlong.environments.tasks.opening import open_task


class RecordingBackend:
    """Keeps the spec and what its folder held at the moment of creation."""

    def __init__(self, scratch: Path | None = None) -> None:
        self.scratch = scratch
        self.found: dict[str, str | None] = {}

    async def create(self, spec: SandboxSpec):
        self.spec = spec
        root = Path(spec.files or "/nonexistent")
        self.found = {
            str(path.relative_to(root)): path.read_text() if path.is_file() else None for path in root.rglob("*")
        }
        return "the sandbox"


def write(folder: Path, dockerfile: str, **files: str) -> Path:
    content = {
        "task.toml": '[environment]\nnetwork_mode = "no-network"\nmemory_mb = 100\nenv = { A = "1" }',
        "instruction.md": "Do it.",
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": "true",
        "solution/solve.sh": "true",
        **files,
    }
    for name, text in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


async def test_one_copied_folder_is_handed_over_as_it_lies(tmp_path: Path):
    task = read_task(write(tmp_path, "FROM a\nCOPY files /app", **{"environment/files/in/x.txt": "1"}))
    backend = RecordingBackend()
    assert await open_task(task, backend, "episode", ttl_s=9.0) == "the sandbox"
    assert backend.spec.files == str(tmp_path / "environment/files")
    assert backend.found == {"in": None, "in/x.txt": "1"}
    assert (backend.spec.name, backend.spec.workdir, backend.spec.ttl_s) == ("episode", "/app", 9.0)
    assert (backend.spec.env, backend.spec.limits.memory_mb, backend.spec.network) == ({"A": "1"}, 100, False)
    assert backend.spec.mounts == ()


async def test_several_copies_and_folders_are_staged_and_the_stage_is_removed(tmp_path: Path):
    dockerfile = "FROM a\nWORKDIR /app\nCOPY files data/\nCOPY one.txt ./\nRUN mkdir -p out/deep"
    files = {"environment/files/x.txt": "x", "environment/one.txt": "1"}
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    backend = RecordingBackend(scratch)
    await open_task(read_task(write(tmp_path / "task", dockerfile, **files)), backend, "episode")
    assert Path(backend.spec.files or "").parent == scratch, "what a kill leaves there is swept with the sandboxes"
    assert backend.found == {"data": None, "data/x.txt": "x", "one.txt": "1", "out": None, "out/deep": None}
    assert not Path(backend.spec.files or "").exists()


async def test_the_stage_is_removed_when_the_sandbox_cannot_start(tmp_path: Path):
    class Refuses(RecordingBackend):
        async def create(self, spec: SandboxSpec):
            await super().create(spec)
            raise SandboxError("full")

    backend = Refuses()
    with pytest.raises(SandboxError, match="full"):
        await open_task(read_task(write(tmp_path, "FROM a\nWORKDIR /app\nRUN mkdir out")), backend, "episode")
    assert not Path(backend.spec.files or "").exists()
