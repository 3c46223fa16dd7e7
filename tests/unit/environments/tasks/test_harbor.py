from pathlib import Path

import pytest

from everlong.environments.tasks.content_hash import content_hash
from everlong.environments.tasks.dockerfile import Copy
from everlong.environments.tasks.harbor import UnsupportedTask, read_task

TOML_1_0 = """\
version = "1.0"

[metadata]
author_name = "A. Person"
difficulty = "easy"

[verifier]
timeout_sec = 120.0

[agent]
timeout_sec = 90

[environment]
build_timeout_sec = 600.0
cpus = 1
memory = "2G"
storage = "512M"
"""

TOML_1_4 = """\
schema_version = "1.4"
artifacts = ["/app/out.txt"]

[task]
name = "org/hello-world"
description = "Says hello"
authors = [{ name = "A. Person", email = "a@example.org" }]
keywords = ["easy"]

[metadata]
kind = "hello"

[verifier]
timeout_sec = 30.5
env = { MODE = "strict" }

[agent]
timeout_sec = 60.0
future_key = 1

[environment]
network_mode = "no-network"
memory_mb = 512
storage_mb = 1024
workdir = "/work"
env = { HOST = "${EL_HOST:-local}", PLAIN = "x" }
new_thing = true

[solution.env]
KEY = "${EL_KEY}"
"""


def write(folder: Path, **files: str) -> Path:
    content = {
        "task.toml": TOML_1_0,
        "instruction.md": "Say hello.\n",
        "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "echo hello\n",
        **files,
    }
    for name, text in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_1_0_task_is_read_and_its_old_sizes_become_todays(tmp_path: Path):
    task = read_task(write(tmp_path / "hello"))
    assert (task.id, task.task.instruction, task.task.workdir) == ("hello", "Say hello.", "/app")
    assert (task.task.agent_timeout_s, task.task.verifier_timeout_s) == (90.0, 120.0)
    assert (task.task.limits.memory_mb, task.task.limits.disk_mb) == (2048, 512)
    assert (task.tests, task.solution) == (str(tmp_path / "hello/tests"), str(tmp_path / "hello/solution"))
    assert task.ignored_keys == ()
    assert "image debian:12 is not used: the sandbox runs the host's own tools" in task.notes
    assert "no network: task.toml does not ask for it" in task.notes


def test_a_1_4_task_is_read_with_its_env_and_its_unknown_keys_are_named(tmp_path: Path):
    folder = write(tmp_path, **{"task.toml": TOML_1_4})
    task = read_task(folder, {"EL_KEY": "k"})
    assert (task.id, task.task.kind, task.task.workdir, task.task.network) == (
        "org/hello-world",
        "hello",
        "/work",
        False,
    )
    assert task.task.env == {"HOST": "local", "PLAIN": "x"}
    assert (task.verifier_env, task.solution_env) == ({"MODE": "strict"}, {"KEY": "k"})
    assert task.ignored_keys == ("agent.future_key", "environment.new_thing")
    assert "artifacts are not collected" in task.notes
    assert read_task(folder, {"EL_KEY": "k", "EL_HOST": "far"}).task.env["HOST"] == "far"
    with pytest.raises(ValueError, match="KEY needs the environment variable EL_KEY: set it"):
        read_task(folder, {})


def test_a_public_network_is_taken_only_where_the_file_asks(tmp_path: Path):
    asks = TOML_1_0.replace("cpus = 1", "allow_internet = true")
    assert read_task(write(tmp_path / "a", **{"task.toml": asks})).task.network is True
    assert read_task(write(tmp_path / "b", **{"task.toml": asks.replace("true", "false")})).task.network is False


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("environment/docker-compose.yaml", "services: {}", "environment/docker-compose.yaml"),
        ("environment/.dockerignore", "*", "environment/.dockerignore"),
        ("task.toml", "[environment]\ngpus = 1", "environment.gpus = 1"),
        ("task.toml", '[environment]\nos = "windows"', 'environment.os = "windows"'),
        ("task.toml", '[[environment.mcp_servers]]\nname = "x"', "environment.mcp_servers"),
        ("task.toml", '[[steps]]\nname = "one"', "steps"),
        ("task.toml", '[environment]\nnetwork_mode = "allowlist"', 'environment.network_mode = "allowlist"'),
        ("task.toml", '[environment.healthcheck]\ncommand = "true"', "environment.healthcheck"),
        ("task.toml", '[verifier]\nenvironment_mode = "separate"', 'verifier.environment_mode = "separate"'),
        ("task.toml", '[agent]\nuser = "agent"', "agent.user = 'agent'"),
        ("environment/Dockerfile", "FROM a\nRUN apt-get install -y git", "Dockerfile line 2: RUN apt-get install -y git"),
        ("environment/Dockerfile", "FROM a\nADD x /app/", "Dockerfile line 2: ADD x /app/"),
        ("environment/Dockerfile", 'FROM a\n# c\nENTRYPOINT ["x"]', 'Dockerfile line 3: ENTRYPOINT ["x"]'),
        ("environment/Dockerfile", "FROM a\nUSER agent", "Dockerfile line 2: USER agent"),
        ("environment/Dockerfile", "FROM a\nFROM b", "Dockerfile line 2: a second FROM"),
        ("environment/Dockerfile", "FROM a\nCOPY --chown=1 x /app/", "COPY with options"),
        ("environment/Dockerfile", "FROM a\nWORKDIR /usr/lib", "workdir '/usr/lib' must be an absolute folder of its own"),
        ("environment/Dockerfile", "FROM a\nWORKDIR /app\nCOPY Dockerfile /etc/", "/etc/Dockerfile lies outside the workdir"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, file: str, content: str, named: str):
    with pytest.raises(UnsupportedTask) as refusal:
        read_task(write(tmp_path / "t", **{file: content}))
    assert named in str(refusal.value) and "task t" in str(refusal.value)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("task.toml", "version = ", "task.toml: Invalid value"),
        ("task.toml", 'schema_version = "9.9"', "schema_version must be one of 1.0, 1.1, 1.2, 1.3, 1.4, got '9.9'"),
        (
            "task.toml",
            '[agent]\ntimeout_sec = "5"',
            r"task.toml: Expected `float \| null`, got `str` - at `\$.agent.time",
        ),
        ("task.toml", "[agent]\ntimeout_sec = -1", "agent.timeout_sec must be a finite number above 0, got -1"),
        ("task.toml", "[verifier]\ntimeout_sec = nan", "verifier.timeout_sec must be a finite number above 0"),
        ("task.toml", '[environment]\nmemory = "two"', 'environment.memory must be a size like "512M" or "2G"'),
        ("task.toml", '[environment]\nmemory = "2G"\nmemory_mb = 1', "contradicts environment.memory_mb"),
        ("instruction.md", " \n", "instruction.md is empty"),
        (
            "environment/Dockerfile",
            "FROM a\nCOPY data /app/",
            "COPY data: expected .*/environment/data, found Dockerfile",
        ),
        ("environment/Dockerfile", "FROM a\nCOPY ../task.toml /app/", "leads out of"),
        ("environment/Dockerfile", "FROM a\nENV A", "Dockerfile, line 2: ENV needs NAME=value, got 'A'"),
    ],
)
def test_bad_content_says_where_and_what(tmp_path: Path, file: str, content: str, said: str):
    with pytest.raises(ValueError, match=said):
        read_task(write(tmp_path, **{file: content}))


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "tests/test.sh", "environment/Dockerfile"])
def test_a_missing_file_is_named_with_what_was_expected(tmp_path: Path, missing: str):
    folder = write(tmp_path / "t")
    (folder / missing).unlink()
    with pytest.raises(FileNotFoundError, match=rf"task t: expected .*{missing}"):
        read_task(folder)


def test_a_docker_image_stands_in_for_a_dockerfile(tmp_path: Path):
    folder = write(tmp_path, **{"task.toml": '[environment]\ndocker_image = "python:3.12"'})
    (folder / "environment/Dockerfile").unlink()
    task = read_task(folder)
    assert task.copies == ()
    assert "image python:3.12 is not used: the sandbox runs the host's own tools" in task.notes
    assert "the Dockerfile names no WORKDIR: /app is taken" in task.notes


def test_a_dockerfile_says_what_the_workdir_holds(tmp_path: Path):
    dockerfile = """\
# syntax=docker/dockerfile:1
FROM debian:12
WORKDIR /srv
WORKDIR app
ENV A=1 \\
    B="two words"
ENV C three
COPY files/ .
COPY one.txt two.txt data/
COPY ["one.txt", "/srv/app/first"]
RUN mkdir -p out /srv/app/deep/er
CMD ["sleep", "infinity"]
"""
    files = {"environment/files/x": "", "environment/one.txt": "1", "environment/two.txt": "2"}
    task = read_task(write(tmp_path, **{"environment/Dockerfile": dockerfile, **files}))
    context = tmp_path / "environment"
    assert task.task.workdir == "/srv/app"
    assert task.task.env == {"A": "1", "B": "two words", "C": "three"}
    assert task.folders == ("out", "deep/er")
    assert task.copies == (
        Copy(source=str(context / "files"), target="."),
        Copy(source=str(context / "one.txt"), target="data/one.txt"),
        Copy(source=str(context / "two.txt"), target="data/two.txt"),
        Copy(source=str(context / "one.txt"), target="first"),
    )


def test_the_content_hash_is_of_names_modes_and_bytes_only(tmp_path: Path):
    here, there = write(tmp_path / "here"), write(tmp_path / "far" / "there")
    assert content_hash(here) == content_hash(there)
    before = content_hash(here)
    (here / "tests/test.sh").chmod(0o755)
    executable = content_hash(here)
    (here / "tests/test.sh").chmod(0o700)
    assert content_hash(here) == executable != before
    (here / "tests/test.sh").chmod(0o644)
    assert content_hash(here) == before
    (here / "tests/test.sh").rename(here / "tests/other.sh")
    assert content_hash(here) != before


def test_a_link_out_of_the_task_is_refused(tmp_path: Path):
    folder = write(tmp_path / "t")
    (folder / "environment/secret").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="secret is a link that leads out of its task folder"):
        read_task(folder)
