"""Reads a task folder in the Harbor format: everything is checked here, so that nothing breaks after a run has started.

task/  instruction.md  task.toml  environment/[Dockerfile]  tests/test.sh  [solution/solve.sh]

The agent never sees tests/ or solution/. What everlong cannot honour is refused by name; what it reads differently is said
in `notes`.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

from everlong.contracts.records import Limits, Record, Task
from everlong.environments.tasks.content_hash import content_hash
from everlong.environments.tasks.dockerfile import Copy, Plan, read_dockerfile
from everlong.environments.tasks.manifest import TaskToml, parse_manifest, unsupported, wants_network

DEFAULT_WORKDIR = "/app"
VERDICT_FOLDER = "/logs/verifier"
"""Where a verifier writes what it found."""
_RESERVED = ("/tests", "/solution", "/logs", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/dev", "/sys")
_TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


class UnsupportedTask(ValueError):
    """The task is well formed but asks for something that everlong cannot honour."""


class HarborTask(Record, frozen=True, kw_only=True):
    """A task with what its runner, its verifier and its oracle need.

    Example: read_task(Path("tasks/count-lines-17")).task.id == "terminal/count-lines/17"
    """

    task: Task
    tests: str
    """Folder of the host that the verifier sees at /tests."""
    solution: str | None
    """Folder of the host that the oracle sees at /solution; None where the task has none."""
    copies: tuple[Copy, ...] = ()
    """What the workdir holds at the start."""
    folders: tuple[str, ...] = ()
    """Empty folders at the start, relative to the workdir."""
    verifier_env: dict[str, str] = {}
    solution_env: dict[str, str] = {}
    evaluate_only: bool = False
    """`metadata.evaluate_only`: a public benchmark, which no run may train on."""
    notes: tuple[str, ...] = ()
    """What is read differently from the format's own runner."""
    ignored_keys: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return self.task.id


def read_task(folder: Path, environ: Mapping[str, str] | None = None) -> HarborTask:
    """Read and check one task folder. `environ` answers `${VAR}` in task.toml; None is the process's own.

    Raises FileNotFoundError for a missing file, UnsupportedTask for what cannot be honoured, ValueError for bad content.
    """
    folder = folder.resolve()
    environ = os.environ if environ is None else environ
    manifest = parse_manifest(_read(folder, "task.toml"), str(folder / "task.toml"))
    values = manifest.values
    instruction = _read(folder, "instruction.md").strip()
    if not instruction:
        raise ValueError(f"{folder / 'instruction.md'} is empty: the agent needs to be told what to do")
    _read(folder, "tests/test.sh")
    plan = _environment(folder, values)
    workdir = _workdir(folder, values, plan)
    copies, folders = _inside(folder, plan, workdir)
    env = {**plan.env, **_resolve(values.environment.env, environ, folder)}
    return HarborTask(
        task=_task(folder, values, instruction, workdir, env),
        tests=str(folder / "tests"),
        solution=str(folder / "solution") if (folder / "solution" / "solve.sh").is_file() else None,
        copies=copies,
        folders=folders,
        verifier_env=_resolve(values.verifier.env, environ, folder),
        solution_env=_resolve(values.solution.env, environ, folder),
        evaluate_only=values.metadata.get("evaluate_only") is True,
        notes=_notes(values, plan, manifest.ignored_keys),
        ignored_keys=manifest.ignored_keys,
    )


def _read(folder: Path, name: str) -> str:
    path = folder / name
    if not path.is_file():
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else "no such folder"
        raise FileNotFoundError(f"task {folder.name}: expected the file {path}, found {found or 'an empty folder'}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8 text: {error}") from error


def _environment(folder: Path, values: TaskToml) -> Plan:
    environment = folder / "environment"
    refused = unsupported(values)
    for name in ("docker-compose.yaml", "docker-compose.yml", ".dockerignore"):
        if (environment / name).exists():
            refused.append(f"environment/{name}")
    plan = Plan(image=values.environment.docker_image or "")
    if (environment / "Dockerfile").is_file():
        plan = read_dockerfile(environment / "Dockerfile")
        refused += plan.refused
    elif not plan.image:
        raise FileNotFoundError(
            f"task {folder.name}: expected {environment / 'Dockerfile'} or environment.docker_image in task.toml"
        )
    if refused:
        raise UnsupportedTask(f"task {folder.name} asks for what everlong cannot honour: {'; '.join(refused)}")
    return plan


def _workdir(folder: Path, values: TaskToml, plan: Plan) -> str:
    workdir = posixpath.normpath(values.environment.workdir or plan.workdir or DEFAULT_WORKDIR)
    if not posixpath.isabs(workdir) or workdir == "/" or _is_below(workdir, _RESERVED):
        raise UnsupportedTask(
            f"task {folder.name}: workdir {workdir!r} must be an absolute folder of its own, such as {DEFAULT_WORKDIR}"
        )
    return workdir


def _is_below(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(root + "/") for root in roots)


def _inside(folder: Path, plan: Plan, workdir: str) -> tuple[tuple[Copy, ...], tuple[str, ...]]:
    outside = [target for target in (*(target for _, target in plan.copies), *plan.folders)
               if not _is_below(target, (workdir,))]  # fmt: skip
    if outside:
        raise UnsupportedTask(f"task {folder.name}: {', '.join(outside)} lies outside the workdir {workdir}")
    copies = [Copy(source=str(source), target=posixpath.relpath(target, workdir)) for source, target in plan.copies]
    return tuple(copies), tuple(posixpath.relpath(path, workdir) for path in plan.folders)


def _resolve(env: Mapping[str, str], environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    resolved = {}
    for name, value in env.items():
        template = _TEMPLATE.fullmatch(value)
        if template:
            variable, default = template.groups()
            if variable not in environ and default is None:
                raise ValueError(f"task {folder.name}: {name} needs the environment variable {variable}: set it")
            value = environ.get(variable, default)
        resolved[name] = value
    return resolved


def _task(folder: Path, values: TaskToml, instruction: str, workdir: str, env: dict[str, str]) -> Task:
    package, environment, limits = values.task, values.environment, Limits()
    name = values.metadata.get("id") or (package.name if package else folder.name)
    return Task(
        id=str(name),
        folder=str(folder),
        content_hash=content_hash(folder),
        instruction=instruction,
        workdir=workdir,
        env=env,
        kind=str(values.metadata.get("kind", "")),
        agent_timeout_s=values.agent.timeout_sec or 600.0,
        verifier_timeout_s=values.verifier.timeout_sec,
        network=wants_network(values),
        limits=Limits(
            memory_mb=environment.memory_mb or limits.memory_mb, disk_mb=environment.storage_mb or limits.disk_mb
        ),
    )


def _notes(values: TaskToml, plan: Plan, ignored_keys: tuple[str, ...]) -> tuple[str, ...]:
    environment = values.environment
    said = {
        f"image {plan.image} is not used: the sandbox runs the host's own tools": bool(plan.image),
        f"the Dockerfile names no WORKDIR: {DEFAULT_WORKDIR} is taken": not (environment.workdir or plan.workdir),
        "no network: task.toml does not ask for it": environment.network_mode is None,
        f"cpus = {environment.cpus} is not enforced": environment.cpus is not None,
        "artifacts are not collected": bool(values.artifacts),
        f"unknown keys: {', '.join(ignored_keys)}": bool(ignored_keys),
    }
    return tuple(note for note, is_so in said.items() if is_so)
