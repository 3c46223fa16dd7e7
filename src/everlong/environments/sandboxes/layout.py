"""What a sandbox's spec may ask for, and how it lies on the host: `home/root` holds its own folders at their paths inside."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Container
from pathlib import Path
from urllib.parse import quote

from everlong.contracts.errors import SandboxError
from everlong.contracts.ports import Mount, SandboxSpec, Snapshot
from everlong.contracts.records import Limits
from everlong.environments.sandboxes.folders import Territory, is_below
from everlong.environments.sandboxes.trees import TreeSize, copy_tree, remove_tree

TMP = "/tmp"
MAX_ENTRIES = 1_000_000
"""Names that commands may add to a sandbox. No limit of the kernel holds them, and a copy of so many takes a minute."""
_TAKEN = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/proc", "/dev", "/sys", "/var/tmp")
_MAX_NAME = 200


def private_folders(spec: SandboxSpec) -> tuple[str, ...]:
    """Every folder inside that may be written: the workdir first."""
    return tuple(dict.fromkeys((spec.workdir, TMP, *spec.writable)))


def room_of(start: TreeSize, limits: Limits) -> TreeSize:
    """What commands may leave: the limits, beyond what the workdir was made with."""
    return TreeSize(start.entries + MAX_ENTRIES, start.size_bytes + (limits.disk_mb << 20))


def folder_name(name: str) -> str:
    """A file name for any sandbox name, so that names may hold slashes. Raises ValueError for one that is too long."""
    quoted = "s-" + quote(name, safe="")
    if not name or len(quoted) > _MAX_NAME:
        raise ValueError(f"a sandbox needs a name of at most about {_MAX_NAME} letters, got {name!r}")
    return quoted


def check_names(names: tuple[str, ...], taken: Container[str]) -> None:
    """Raises ValueError, SandboxError unless every name is a free one."""
    if not names or len(set(names)) < len(names):
        raise ValueError(f"a restore needs at least one name and each once, got {names}")
    for name in names:
        folder_name(name)
        if name in taken:
            raise SandboxError(f"a sandbox named {name!r} is open already: names are unique within a backend")


def unknown_snapshot(snapshot: Snapshot) -> ValueError:
    return ValueError(
        f"snapshot {snapshot.id} of sandbox {snapshot.sandbox} is not kept here: it was dropped, or another backend took it"
    )


def check_spec(spec: SandboxSpec) -> None:
    """Raises ValueError for a spec that no sandbox can have."""
    folder_name(spec.name)
    paths = [*private_folders(spec), *(mount.target for mount in spec.mounts)]
    for path in paths:
        if posixpath.normpath(path) != path or not path.startswith("/") or path == "/":
            raise ValueError(f"a folder of sandbox {spec.name} must be absolute, plain and not /, got {path!r}")
        if any(is_below(path, taken) for taken in _TAKEN):
            raise ValueError(f"{path} cannot be a folder of sandbox {spec.name}: {', '.join(_TAKEN)} are the system's")
    for index, path in enumerate(paths):
        for other in paths[index + 1 :]:
            if is_below(path, other) or is_below(other, path):
                raise ValueError(f"folders of sandbox {spec.name} must not lie in each other, got {path} and {other}")
    for source in [mount.source for mount in spec.mounts] + ([spec.files] if spec.files is not None else []):
        if not Path(source).is_dir():
            raise ValueError(f"sandbox {spec.name} needs the folder {source}, which is not there or not a folder")
    if spec.ttl_s is not None and spec.ttl_s <= 0:
        raise ValueError(f"ttl_s of sandbox {spec.name} must be > 0 or None, got {spec.ttl_s}")


def make_home(home: Path) -> None:
    home.mkdir()
    (home / "mountpoint").mkdir()


def fill_folders(
    territory: Territory, workdir: str, source: tuple[Path, ...] = (), room: TreeSize | None = None
) -> TreeSize:
    """Make the sandbox's own folders and fill the workdir with a copy of `source`; gives its size.

    `source`: layers of one folder, top first. Raises WorkspaceTooLarge beyond `room`.
    """
    for path in territory.folders:
        territory.host(path).mkdir(parents=True)
    territory.host(TMP).chmod(0o1777)
    size = copy_tree(source, territory.host(workdir), territory.owner, room)
    territory.take(territory.folders)
    return size


def place_mounts(home: Path, territory: Territory, mounts: tuple[Mount, ...], *, caged: bool) -> list[tuple[str, str]]:
    """What to mount where (source on the host, target inside).

    A copy takes the source's place where nothing can be mounted, and where commands run as another user than ours who could
    not read the files.
    """
    placed = []
    for index, mount in enumerate(mounts):
        source = Path(mount.source).resolve()
        if not caged or (territory.owner is not None and not _everybody_reads(source)):
            copy = home / "mounts" / str(index) if caged else territory.host(mount.target)
            remove_tree(copy)  # a restored sandbox's lies there already, as the snapshot found it
            copy.mkdir(parents=True)
            copy_tree(source, copy, territory.owner)
            source = copy
        placed.append((str(source), mount.target))
    return placed


def _everybody_reads(folder: Path) -> bool:
    if folder.stat().st_mode & 0o005 != 0o005:
        return False
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if not _everybody_reads(Path(entry.path)):
                    return False
            elif entry.is_file(follow_symlinks=False) and not entry.stat(follow_symlinks=False).st_mode & 0o004:
                return False
    return True
