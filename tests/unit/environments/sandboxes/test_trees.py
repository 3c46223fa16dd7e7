"""Whatever an agent leaves in a folder can be copied, or is said to be too large, and can be removed."""

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from everlong.contracts.errors import SandboxError, WorkspaceTooLarge
from everlong.environments.sandboxes.folders import Territory
from everlong.environments.sandboxes.trees import TreeSize, copy_tree, remove_tree

DEEP = 3000
"""Levels; a path this long (2 bytes a level) is beyond PATH_MAX."""


@pytest.fixture
def source(tmp_path: Path):
    folder = tmp_path / "source"
    folder.mkdir()
    yield folder
    remove_tree(folder)
    assert not folder.exists()


@pytest.fixture
def target(tmp_path: Path):
    folder = tmp_path / "target"
    folder.mkdir()
    yield folder
    remove_tree(folder)
    assert not folder.exists()


def run_in(folder: Path, script: str) -> None:
    subprocess.run([sys.executable, "-c", "import os\n" + script], cwd=folder, check=True)


def test_a_chain_of_folders_longer_than_a_path_may_be_is_copied_to_its_end(source, target):
    run_in(source, f"for _ in range({DEEP}): os.mkdir('d'); os.chdir('d')\nopen('end', 'w').write('here')")
    assert copy_tree(source, target, None).entries == DEEP + 1
    run_in(target, f"for _ in range({DEEP}): os.chdir('d')\nassert open('end').read() == 'here'")


def test_a_deep_tree_takes_no_open_file_per_level(source, target):
    run_in(source, f"for _ in range({DEEP}): os.mkdir('d'); os.chdir('d')")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 20, limits[1]))
    try:
        copy_tree(source, target, None)
        remove_tree(target)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(os.listdir("/proc/self/fd")) == opened
    target.mkdir()


def test_folders_beside_and_in_each_other_keep_names_modes_times_and_links(source, target):
    names = [b"plain", b"\xff\xfe bytes", "ünïcode".encode(), b"new\nline", b"n" * 255]
    for name in names:
        os.makedirs(os.path.join(os.fsencode(source), name, b"in", name))
        with open(os.path.join(os.fsencode(source), name, b"file"), "wb") as file:
            file.write(name)
    (source / "link").symlink_to("/etc/passwd")
    (source / "plain/file").chmod(0o4751)
    (source / "plain").chmod(0o2555)
    os.utime(source / "plain", (1, 2))
    copy_tree(source, target, None)
    for name in names:
        copied = os.path.join(os.fsencode(target), name)
        assert sorted(os.listdir(copied)) == [b"file", b"in"] and os.listdir(os.path.join(copied, b"in")) == [name]
        with open(os.path.join(copied, b"file"), "rb") as file:
            assert file.read() == name
    assert os.readlink(target / "link") == "/etc/passwd"
    assert (target / "plain/file").stat().st_mode & 0o7777 == 0o751
    assert (target / "plain").stat().st_mode & 0o7777 == 0o555
    assert (target / "plain").stat().st_mtime == 2


def test_pipes_and_sockets_are_left_out(source, target):
    os.mkfifo(source / "pipe")
    (source / "file").write_text("x")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(source / "socket"))
        copy_tree(source, target, None)
    assert os.listdir(target) == ["file"]


def test_a_file_with_many_names_is_one_file_of_the_copy(source, target):
    (source / "in").mkdir()
    (source / "a").write_bytes(os.urandom(1 << 20))
    for number in range(20):
        os.link(source / "a", source / "in" / f"{number}")
    size = copy_tree(source, target, None)
    assert 1 << 20 <= size.size_bytes < 2 << 20 and size.entries == 22
    assert {path.stat().st_ino for path in target.glob("in/*")} == {(target / "a").stat().st_ino}
    assert (target / "a").stat().st_nlink == 21 and (target / "a").read_bytes() == (source / "a").read_bytes()
    assert sorted(path.name for path in target.parent.iterdir()) == ["source", "target"]


def test_holes_take_no_room(source, target):
    with open(source / "giant", "wb") as file:
        file.truncate(1 << 40)
    assert copy_tree(source, target, None, TreeSize(1, 1 << 20)).size_bytes < 1 << 20
    assert (target / "giant").stat().st_size == 1 << 40


@pytest.mark.parametrize(
    ("room", "fits"),
    [
        pytest.param(TreeSize(4, 1 << 20), True, id="enough"),
        pytest.param(TreeSize(3, 1 << 20), False, id="a-name-too-many"),
        pytest.param(TreeSize(4, 1 << 12), False, id="a-file-too-large"),
    ],
)
def test_what_is_more_than_there_is_room_for_is_refused(source, target, room, fits):
    (source / "a/b").mkdir(parents=True)
    (source / "a/b/file").write_bytes(bytes(1 << 16))
    (source / "link").symlink_to("a")
    if fits:
        assert copy_tree(source, target, None, room).entries == 4
        return
    with pytest.raises(WorkspaceTooLarge, match=f"may hold {room.entries} names and"):
        copy_tree(source, target, None, room)


LOCKED = """
import os, sys
from pathlib import Path
from everlong.environments.sandboxes.trees import copy_tree, remove_tree

source, target = Path(sys.argv[1], "s"), Path(sys.argv[1], "t")
if os.geteuid() == 0:
    os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
(source / "a/b").mkdir(parents=True)
target.mkdir()
(source / "a/b/file").write_text("x")
for path, mode in (("a/b/file", 0), ("a/b", 0o600), ("a", 0), ("", 0o100)):
    (source / path).chmod(mode)
copy_tree(source, target, None)
for top, mode in ((source, 0o100), (target, 0o755)):
    assert top.stat().st_mode & 0o777 == mode, oct(top.stat().st_mode)
    for path, mode in (("a", 0), ("a/b", 0o600), ("a/b/file", 0)):
        top.chmod(0o700)
        (top / path).parent.chmod(0o700)
        assert (top / path).stat().st_mode & 0o777 == mode, (path, oct((top / path).stat().st_mode))
    (top / "a/b/file").chmod(0o400)
    assert (top / "a/b/file").read_text() == "x"
    (top / "a/b").chmod(0)
    (top / "a").chmod(0)
    remove_tree(top)
    assert not top.exists()
"""


def test_an_ordinary_user_copies_and_removes_what_its_owner_locked(tmp_path):
    place = Path(f"/var/tmp/everlong-test-{os.getpid()}") if os.geteuid() == 0 else tmp_path
    place.mkdir(exist_ok=True)
    place.chmod(0o777)
    try:
        source = str(Path(__file__).parents[4] / "src")
        done = subprocess.run(
            [sys.executable, "-c", LOCKED, str(place)],
            env={**os.environ, "PYTHONPATH": source},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    finally:
        remove_tree(place)


def test_a_link_through_a_thousand_folders_is_refused_before_each_is_held_open(tmp_path):
    (tmp_path / "app").mkdir()
    territory = Territory(root=tmp_path, folders=("/app",), workdir="/app")
    (tmp_path / "app/deep").symlink_to("d/" * 1000)
    run_in(tmp_path / "app", "for _ in range(1000): os.mkdir('d'); os.chdir('d')")
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SandboxError, match="through more than 128 folders"):
        territory.read("deep/file", 10)
    assert len(os.listdir("/proc/self/fd")) == opened
    remove_tree(tmp_path / "app")
