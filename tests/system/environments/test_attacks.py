"""What an agent may try against the machine: each attack comes through outside of a sandbox and is held inside, by every backend,
whoever runs it, and nothing is left on the host."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.attacks.control import comes_through
from tests.attacks.known import ATTACKS, BY_NAME, PLANTS
from tests.attacks.stage import Stage, new_word

from everlong.contracts.errors import SandboxError
from everlong.environments.sandboxes.gvisor import find_runsc
from everlong.environments.sandboxes.trees import remove_tree

ROOT = Path(__file__).parents[3]
NOBODY = 65534
IS_ROOT = os.geteuid() == 0
PLACES = ("local", "gvisor", "local-as-ordinary-user", "gvisor-as-ordinary-user")
NO_NETWORK = "gVisor sandboxes have none"


class Running:
    """A process in which attacks are run (see tests.attacks.place)."""

    def __init__(self, place, base, source, word):
        kind, _, ordinary = place.partition("-as-")
        self.folder = base / place
        self.folder.mkdir()
        self.root = self.folder / "sandboxes"
        user = str(NOBODY) if ordinary else ""
        runsc = ""
        if kind == "gvisor":
            try:
                runsc = str(shutil.copy2(find_runsc(), self.folder / "runsc"))
            except SandboxError as error:
                pytest.skip(str(error))
        if user:
            os.chown(self.folder, NOBODY, NOBODY)
        # numpy starts a thread per core, and a process with several threads may not enter a user namespace
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.attacks.place", kind, self.root, base / "given", user, runsc],
            cwd=source,
            env={**os.environ, **threads, "PYTHONPATH": f"{source}/src:{source}", "EVERLONG_WORD": word},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        said = self.answer()
        if "refused" in said:
            pytest.skip(f"this machine refuses {place}: {said['refused']}")
        self.claim = Path(said["claim"])

    def answer(self):
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait()}"
        return json.loads(line)

    def ask(self, question):
        self.process.stdin.write(f"{question}\n")
        self.process.stdin.flush()
        return self.answer()["found"]

    def close(self):
        """What is left of it on the host."""
        self.process.stdin.close()
        left = [] if self.process.wait(120) == 0 else [f"the process ended with {self.process.returncode}"]
        left += [f"{path} is left" for path in self.root.glob("*")]
        left += [f"group {path} is left" for path in Path("/sys/fs/cgroup").rglob(f"everlong-{self.claim.name}*")]
        for pid in filter(str.isdigit, os.listdir("/proc")):
            for name in ("cmdline", "mountinfo"):
                try:
                    if f"{self.root}/".encode() in Path(f"/proc/{pid}/{name}").read_bytes():
                        left.append(f"process {pid} is left, or has a mount")
                except OSError:
                    continue
        return left


@pytest.fixture(scope="module")
def base():
    """Not below the tests' own folder, which other users may not enter."""
    folder = Path(f"/var/tmp/everlong-attacks-{os.getpid()}")
    folder.mkdir(mode=0o755)
    given = folder / "given"
    given.mkdir()
    shutil.copy2("/usr/bin/id", given / "id")
    (given / "id").chmod(0o4755)
    yield folder
    remove_tree(folder)


@pytest.fixture(scope="module")
def source(base):
    """The checkout where every user may read it."""
    copy = base / "checkout"
    for name in ("src/everlong", "tests/attacks"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def word():
    return new_word()


@pytest.fixture(scope="module")
def places(base, source, word):
    opened = {}

    def get(place):
        if place not in opened:
            if place.endswith("-user") and not IS_ROOT:
                pytest.skip("only root can become another user")
            opened[place] = Running(place, base, source, word)
        return opened[place]

    yield get
    assert {place: running.close() for place, running in opened.items()} == {place: [] for place in opened}


@pytest.fixture(scope="module")
def controls(base, word):
    """Whether an attack comes through outside of a sandbox, found once."""
    found = {}

    def get(attack):
        if attack.name not in found:
            folder = base / f"control-{attack.name}"
            folder.mkdir(mode=0o755)
            (folder / "neighbour").write_text(word)
            with Stage(folder, base / "given", folder, word) as stage:
                (folder / "control").chmod(0o777)
                found[attack.name] = comes_through(attack, stage)
            remove_tree(folder)
        return found[attack.name]

    return get


def needed(attack):
    if attack.machines and platform.machine() not in attack.machines:
        pytest.skip(f"only on {', '.join(attack.machines)}")


@pytest.mark.parametrize("name", BY_NAME)
def test_outside_of_a_sandbox_it_comes_through(name, controls):
    needed(BY_NAME[name])
    if not controls(BY_NAME[name]):
        pytest.skip("this machine holds it by itself, so that sandboxes show nothing")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", BY_NAME)
def test_in_a_sandbox_it_is_held(name, place, places):
    needed(BY_NAME[name])
    found = places(place).ask(name)
    if BY_NAME[name].network and any(NO_NETWORK in line for line in found):
        return  # refused before it begins
    assert found == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("plant", PLANTS)
def test_what_is_planted_for_the_verifier_is_not_paid(plant, place, places):
    assert places(place).ask(f"grade {plant}") == []


@pytest.mark.parametrize(
    ("plant", "command"),
    [
        ("path-trojans", "PATH=$PWD:$PATH; head -c 1 x"),
        ("python-at-home", "HOME=$PWD /usr/bin/python3 -c 'pass'"),
        ("shell-settings", "HOME=$PWD bash -lc 'true'"),
    ],
)
def test_what_is_planted_would_work_elsewhere(plant, command, tmp_path):
    verdict = tmp_path / "reward.txt"
    script = PLANTS[plant].replace("/logs/verifier/reward.txt", str(verdict)).replace('"/tmp"', '"tmp"')
    subprocess.run(["/usr/bin/python3", "-c", f"import os, sys\n{script}"], cwd=tmp_path, check=True)
    assert not verdict.exists()
    subprocess.run(["bash", "-c", command], cwd=tmp_path, timeout=60)
    assert verdict.read_text().strip() == "1"


def test_there_are_at_least_thirty_and_the_documentation_names_each():
    assert len(ATTACKS) >= 30
    text = (ROOT / "docs" / "sandboxes.md").read_text()
    assert [name for name in (*BY_NAME, *PLANTS) if f"`{name}`" not in text] == []
