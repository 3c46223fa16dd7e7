"""What `runsc` is told of a sandbox: a root folder with the sandbox's own files in it, and an OCI configuration.

The root folder and what is mounted are only ever read: every change stays in the memory of the sandbox's kernel, where a
checkpoint finds it. So the sandboxes restored from one snapshot share one root folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from everlong.contracts.ports import SandboxSpec
from everlong.environments.sandboxes.launcher import HOST_ETC, HOST_FOLDERS, INNER_ID, OWN_ETC
from everlong.environments.sandboxes.layout import TMP, private_folders
from everlong.environments.sandboxes.trees import TreeSize, copy_tree

TOOLS = "/.everlong"
"""Where the sandbox sees the launcher, read-only."""
_DOOR = "/run/everlong"
ASK = f"""d={_DOOR}; n=$$; i=0
until [ -p $d/ask ]; do i=$((i + 1)); [ $i -lt 3000 ] || {{ echo "the sandbox's first process made no door" >&2; exit 1; }}; sleep 0.01; done
mkfifo $d/$n.in $d/$n.out || exit 1; echo $n > $d/ask; exec 3<&0; cat <&3 > $d/$n.in 2> /dev/null & exec 3<&- 0</dev/null
cat $d/$n.out; kill $! 2> /dev/null; rm $d/$n.in $d/$n.out"""
"""Run by `runsc exec`: has a launcher started by the first process, and speaks with it in its place. It may come before the first
process has made its door: written to a door that is not there yet, the question would be a file that is read for ever. What `runsc exec` itself
started is killed by gVisor when a checkpoint is restored, so processes that are to live on must come from the first one."""


def first_process(launcher: str) -> tuple[str, ...]:
    """Starts what is asked for at its door, and reaps what a command leaves behind and then loses its parent (bash does)."""
    start = f"/usr/bin/python3 -I -S {launcher} < {_DOOR}/$n.in > {_DOOR}/$n.out"
    wait = f"while :; do read -r n < {_DOOR}/ask || continue; {start} & done"
    return ("/bin/bash", "-c", f"mkdir -m 700 {_DOOR}; mkfifo -m 600 {_DOOR}/ask; {wait}")


_CAPABILITIES = tuple(
    f"CAP_{name}"
    for name in ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETPCAP", "SETUID", "SYS_ADMIN")
)
_READ_ONLY = ("ro", "rbind", "nosuid", "nodev")


def lay_out_root(root: Path, spec: SandboxSpec, source: Path | None) -> TreeSize:
    """The root folder, whose workdir holds a copy of `source`, whose size it gives; everything that may be written belongs to the
    agent's user."""
    root.mkdir(parents=True)
    root.chmod(0o755)
    for name in HOST_FOLDERS:
        if os.path.islink("/" + name):
            (root / name).symlink_to(os.readlink("/" + name))
        elif os.path.isdir("/" + name):
            (root / name).mkdir()
    for name in ("etc", "proc", "dev", "run", "var", TOOLS.strip("/")):
        (root / name).mkdir()
    (root / "var/tmp").symlink_to(TMP)
    owner, size = INNER_ID if os.geteuid() == 0 else None, TreeSize()
    for path in private_folders(spec):
        folder = root / path.strip("/")
        folder.mkdir(parents=True)
        if path == spec.workdir and source is not None:
            size = copy_tree(source, folder, owner)
        if owner is not None:
            os.chown(folder, owner, owner)
    (root / TMP.strip("/")).chmod(0o1777)
    for mount in spec.mounts:
        (root / mount.target.strip("/")).mkdir(parents=True)
    return size


def lay_out_etc(etc: Path) -> None:
    """The least of /etc that programs need, made once for every sandbox: what everybody on the host may read."""
    etc.mkdir()
    etc.chmod(0o755)
    for name, text in OWN_ETC.items():
        (etc / name).write_text(text)
    for name in HOST_ETC:
        _copy_public(Path("/etc") / name, etc / name)


def _copy_public(source: Path, target: Path) -> None:
    if source.is_symlink() and target.parent.name != "etc":
        target.symlink_to(os.readlink(source))
    elif source.is_dir() and source.stat().st_mode & 0o005 == 0o005:
        target.mkdir(mode=0o755)
        for entry in sorted(source.iterdir()):
            _copy_public(entry, target / entry.name)
    elif source.is_file() and source.stat().st_mode & 0o004:
        target.write_bytes(source.read_bytes())


def write_bundle(
    bundle: Path, root: Path, mounts: Sequence[tuple[str, str]], etc: Path, tools: Path, init: Sequence[str]
) -> None:
    """`bundle/config.json` for a sandbox on that root folder. `mounts`: folders of the host and where they are seen."""
    bundle.mkdir(parents=True)
    binds = [
        ("/" + name, "/" + name)
        for name in HOST_FOLDERS
        if os.path.isdir("/" + name) and not os.path.islink("/" + name)
    ]
    binds += [(str(etc), "/etc"), (str(tools), TOOLS)]
    binds += mounts
    shown: list[dict[str, object]] = [{"destination": "/proc", "type": "proc", "source": "proc"}]
    shown += [{"destination": to, "type": "bind", "source": of, "options": _READ_ONLY} for of, to in binds]
    config = {
        "ociVersion": "1.0.0",
        "hostname": "sandbox",
        "root": {"path": str(root), "readonly": False},
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": list(init),
            "env": ["PATH=/usr/bin:/bin"],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), _CAPABILITIES),
        },
        "mounts": shown,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]},
    }
    (bundle / "config.json").write_text(json.dumps(config))
