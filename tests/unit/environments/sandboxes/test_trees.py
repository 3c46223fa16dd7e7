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
from everlong.environments.sandboxes.layers import opaque_mark
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


# Layers ---------------------------------------------------------------------------------------------------------------


def make_layers(folder: Path, *scripts: str) -> tuple[Path, ...]:
    """One per script, top first."""
    made = []
    for index, script in enumerate(scripts):
        (folder / f"layer{index}").mkdir()
        run_in(folder / f"layer{index}", script)
        made.append(folder / f"layer{index}")
    return tuple(made)


def test_layers_are_copied_as_what_they_show_together(source, target):
    stack = make_layers(
        source,
        "os.makedirs('union/in'); open('union/in/top', 'w').write('3'); open('changed', 'w').write('3');"
        "os.mkdir('was-file'); open('was-folder', 'w').write('3'); os.mkdir('union/back'); os.chmod('union', 0o750)",
        "open('changed', 'w').write('22'); os.mkdir('was-folder'); open('was-folder/x', 'w'); open('union', 'w')",
        "os.makedirs('union/in'); open('union/in/hidden', 'w').write('1' * 99); open('was-file', 'w'); open('low', 'w').write('1')",
    )
    size = copy_tree(stack, target, None)
    shown = sorted(str(path.relative_to(target)) for path in target.rglob("*"))
    assert shown == sorted(
        ["union", "union/in", "union/in/top", "union/back", "changed", "was-file", "was-folder", "low"]
    )
    assert size.entries == len(shown), "what is hidden counts nothing"
    assert [(target / name).read_text() for name in ("union/in/top", "changed", "was-folder", "low")] == [
        "3",
        "3",
        "3",
        "1",
    ]
    assert (target / "was-file").is_dir() and (target / "union").stat().st_mode & 0o777 == 0o750


def test_whiteouts_and_opaque_folders_hide_what_lies_below(source, target):
    stack = make_layers(
        source,
        "os.mkdir('opaque'); open('opaque/new', 'w'); os.mkdir('open')",
        "os.makedirs('opaque/old'); os.mkdir('open'); open('open/seen', 'w'); open('removed', 'w')",
    )
    try:
        os.mknod(stack[0] / "removed", 0o20000, os.makedev(0, 0))
        os.setxattr(stack[0] / "opaque", opaque_mark(), b"y")
    except OSError as error:
        pytest.skip(f"no overlay's marks can be made here: {error}")
    copy_tree(stack, target, None)
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*")) == [
        "opaque",
        "opaque/new",
        "open",
        "open/seen",
    ]


def test_a_chain_that_ends_in_another_layer_than_it_began_is_copied_to_both_ends(source, target):
    chain = "for _ in range({}): os.mkdir('d'); os.chdir('d')\nopen('end{}', 'w').write('here')"
    stack = make_layers(source, chain.format(DEEP // 2, 0), chain.format(DEEP, 1), "open('low', 'w')")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 20, limits[1]))
    try:
        assert copy_tree(stack, target, None).entries == DEEP + 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(os.listdir("/proc/self/fd")) == opened
    run_in(
        target,
        f"for _ in range({DEEP // 2}): os.chdir('d')\nassert open('end0').read() == 'here'\n"
        f"for _ in range({DEEP - DEEP // 2}): os.chdir('d')\nassert open('end1').read() == 'here'",
    )


def test_layers_that_are_too_large_together_are_refused_and_left_as_they_were(source, target):
    stack = make_layers(
        source,
        "os.makedirs('a/b'); open('a/b/1', 'wb').write(bytes(1 << 16)); os.chmod('a/b', 0); os.chmod('a', 0o500)",
        "os.makedirs('a/b'); open('a/b/2', 'wb').write(bytes(1 << 16)); os.chmod('a/b', 0o100); os.chmod('a', 0)",
    )
    size = copy_tree(stack, target, None)
    assert size.entries == 4 and size.size_bytes >= 2 << 16
    remove_tree(target)
    target.mkdir()
    with pytest.raises(WorkspaceTooLarge, match="may hold 4 names"):
        copy_tree(stack, target, None, TreeSize(4, size.size_bytes - 1))
    assert [(layer / "a").stat().st_mode & 0o777 for layer in stack] == [0o500, 0]
    for layer in stack:
        (layer / "a").chmod(0o700)
    assert [(layer / "a/b").stat().st_mode & 0o777 for layer in stack] == [0, 0o100]


def test_a_copy_of_layers_that_keeps_owners_gives_links_and_folders_back_too(source, target):
    if os.geteuid() != 0:
        pytest.skip("only root may give files away")
    (stack,) = make_layers(source, "os.mkdir('d'); open('d/f', 'w'); os.symlink('f', 'd/link')")
    for path in ("d", "d/f", "d/link"):
        os.chown(stack / path, 1234, 4321, follow_symlinks=False)
    copy_tree((stack,), target, None, keep_owners=True)
    for path in ("d", "d/f", "d/link"):
        status = (target / path).lstat()
        assert (status.st_uid, status.st_gid) == (1234, 4321), path


def test_what_stands_in_a_trees_place_is_removed_and_not_what_it_points_to(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to("kept")
    remove_tree(tmp_path / "link")
    remove_tree(tmp_path / "absent")
    assert os.listdir(tmp_path) == ["kept"]
