"""`task.toml` of a Harbor task: schema 1.0 (`version`) to 1.4 (`schema_version`), read with tolerance as 1.4.

Unknown keys are kept and named, legacy keys become today's, and what everlong cannot honour is listed by name.
"""

from __future__ import annotations

import tomllib
from typing import Any

import msgspec

from everlong.contracts.records import Record

SCHEMA_VERSION = "1.4"
_KNOWN_VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
_PUBLIC, _NO_NETWORK = "public", "no-network"


class Package(Record, frozen=True, kw_only=True):
    name: str
    """org/name."""
    version: str | None = None
    description: str = ""
    authors: list[Any] = []
    keywords: list[str] = []


class Verifier(Record, frozen=True, kw_only=True):
    timeout_sec: float = 600.0
    env: dict[str, str] = {}
    user: str | int | None = None
    network_mode: str | None = None
    allowed_hosts: list[str] | None = None
    environment_mode: str | None = None
    environment: dict[str, Any] | None = None
    collect: list[Any] = []


class Agent(Record, frozen=True, kw_only=True):
    timeout_sec: float | None = None
    user: str | int | None = None
    network_mode: str | None = None
    allowed_hosts: list[str] | None = None


class Environment(Record, frozen=True, kw_only=True):
    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: Any = None
    network_mode: str | None = None
    """None where the file does not say; the format's own default is "public"."""
    allowed_hosts: list[str] | None = None
    mcp_servers: list[Any] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: Any = None
    workdir: str | None = None


class Solution(Record, frozen=True, kw_only=True):
    env: dict[str, str] = {}


class TaskToml(Record, frozen=True, kw_only=True):
    """The file as typed values; `data` is the same as nested dicts, unknown keys included."""

    schema_version: str = SCHEMA_VERSION
    task: Package | None = None
    metadata: dict[str, Any] = {}
    verifier: Verifier = Verifier()
    agent: Agent = Agent()
    environment: Environment = Environment()
    solution: Solution = Solution()
    source: str | None = None
    multi_step_reward_strategy: str | None = None
    steps: list[Any] = []
    artifacts: list[Any] = []


class Manifest(Record, frozen=True, kw_only=True):
    values: TaskToml
    data: dict[str, Any]
    ignored_keys: tuple[str, ...]
    """Dotted names of keys that everlong does not know."""


def parse_manifest(text: str, where: str) -> Manifest:
    """Read task.toml. Raises ValueError that names the file and the key for bad TOML, a wrong type or a bad size."""
    try:
        data = _normalise(tomllib.loads(text))
        values = msgspec.convert(data, TaskToml)
        _check_times(values)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    return Manifest(values=values, data=data, ignored_keys=tuple(_unknown(data, TaskToml)))


def unsupported(values: TaskToml) -> list[str]:
    """What the file asks for that everlong cannot honour, each by its key."""
    environment, verifier = values.environment, values.verifier
    asked = {
        f"environment.gpus = {environment.gpus}": bool(environment.gpus),
        "environment.tpu": environment.tpu is not None,
        f'environment.os = "{environment.os}"': environment.os.lower() != "linux",
        "environment.mcp_servers": bool(environment.mcp_servers),
        "environment.skills_dir": environment.skills_dir is not None,
        "environment.healthcheck": environment.healthcheck is not None,
        "steps": bool(values.steps),
        'verifier.environment_mode = "separate"': verifier.environment_mode == "separate",
        "verifier.environment": verifier.environment is not None,
        "verifier.collect": bool(verifier.collect),
    }
    for name, section in (("environment", environment), ("agent", values.agent), ("verifier", verifier)):
        asked[f"{name}.allowed_hosts"] = bool(section.allowed_hosts)
        known = (None, _NO_NETWORK, _PUBLIC if name == "environment" else None)
        asked[f'{name}.network_mode = "{section.network_mode}"'] = section.network_mode not in known
    for name, section in (("agent", values.agent), ("verifier", verifier)):
        asked[f"{name}.user = {section.user!r}"] = section.user not in (None, "root", 0)
    return [key for key, is_asked in asked.items() if is_asked]


def wants_network(values: TaskToml) -> bool:
    """Only where the file says so: the format's default of a public network is not taken silently."""
    return values.environment.network_mode == _PUBLIC


def _normalise(data: dict[str, Any]) -> dict[str, Any]:
    if "version" in data:
        data.setdefault("schema_version", str(data.pop("version")))
    version = str(data.get("schema_version", "1.0"))
    if version not in _KNOWN_VERSIONS:
        raise ValueError(f"schema_version must be one of {', '.join(_KNOWN_VERSIONS)}, got {version!r}")
    data["schema_version"] = SCHEMA_VERSION
    environment = data.get("environment", {})
    if not isinstance(environment, dict):
        raise ValueError("environment must be a table")
    for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
        if isinstance(environment.get(old), str):
            size_mb = _size_mb(environment.pop(old), f"environment.{old}")
            if environment.setdefault(new, size_mb) != size_mb:
                raise ValueError(f"environment.{old} ({size_mb} MB) contradicts environment.{new}: keep one of them")
    allow_internet = environment.pop("allow_internet", None)
    if allow_internet is not None and "network_mode" not in environment:
        environment["network_mode"] = _PUBLIC if allow_internet else _NO_NETWORK
    return data


def _size_mb(text: str, key: str) -> int:
    scales = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
    number, unit = text.strip()[:-1], text.strip()[-1:].upper()
    try:
        return int(float(number) * scales[unit])
    except (KeyError, ValueError, OverflowError):
        raise ValueError(f'{key} must be a size like "512M" or "2G", got {text!r}') from None


def _check_times(values: TaskToml) -> None:
    for name, seconds in (("agent", values.agent.timeout_sec), ("verifier", values.verifier.timeout_sec)):
        if seconds is not None and not 0 < seconds < float("inf"):
            raise ValueError(f"{name}.timeout_sec must be a finite number above 0, got {seconds}")
    for name in ("memory_mb", "storage_mb"):
        size_mb = getattr(values.environment, name)
        if size_mb is not None and size_mb <= 0:
            raise ValueError(f"environment.{name} must be above 0, got {size_mb}")


def _unknown(data: dict[str, Any], kind: type[msgspec.Struct], prefix: str = "") -> list[str]:
    """Dotted names of keys that no field of `kind` takes; free tables (metadata, env) hold no unknown keys."""
    sections = {"task": Package, "verifier": Verifier, "agent": Agent, "environment": Environment, "solution": Solution}
    names: list[str] = []
    for key, value in data.items():
        if key not in kind.__struct_fields__:
            names.append(prefix + key)
        elif kind is TaskToml and key in sections:
            names += _unknown(value, sections[key], f"{key}.")
    return names
