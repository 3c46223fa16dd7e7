"""What a sandbox's spec may ask for, and how it lies on the host: `home/root` holds its own folders at their paths inside."""

from __future__ import annotations

import posixpath
from pathlib import Path
from urllib.parse import quote

from everlong.contracts.ports import SandboxSpec
from everlong.environments.sandboxes.folders import Territory, copy_tree, is_below

TMP = "/tmp"
_TAKEN = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/proc", "/dev", "/sys", "/var/tmp")
_MAX_NAME = 200


def private_folders(spec: SandboxSpec) -> tuple[str, ...]:
    """Every folder inside that may be written: the workdir first."""
    return tuple(dict.fromkeys((spec.workdir, TMP, *spec.writable)))


def folder_name(name: str) -> str:
    """A file name for any sandbox name, so that names may hold slashes. Raises ValueError for one that is too long."""
    quoted = "s-" + quote(name, safe="")
    if not name or len(quoted) > _MAX_NAME:
        raise ValueError(f"a sandbox needs a name of at most about {_MAX_NAME} letters, got {name!r}")
    return quoted


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


def lay_out(home: Path, territory: Territory, spec: SandboxSpec, source: Path | None, *, copy_mounts: bool) -> None:
    """Make the folders and fill the workdir. `copy_mounts`: where nothing can be mounted, a mount is a copy."""
    home.mkdir()
    (home / "mountpoint").mkdir()
    for path in territory.folders:
        territory.host(path).mkdir(parents=True)
    territory.host(TMP).chmod(0o1777)
    if source is not None:
        copy_tree(source, territory.host(spec.workdir), territory.owner)
    if copy_mounts:
        for mount in spec.mounts:
            territory.host(mount.target).mkdir(parents=True)
            copy_tree(Path(mount.source), territory.host(mount.target), territory.owner)
    territory.take(territory.folders)
