"""What the operating system refused, in words that say what was expected, what came and what to do."""

from __future__ import annotations

import errno
import os
import socket

_MEANINGS = {
    errno.EACCES: ("this user may not use it", "change its permissions, or name another place"),
    errno.EPERM: ("this user may not do that", "run as another user, or name another place"),
    errno.EROFS: ("it lies on a file system that is read-only", "name a place that can be written"),
    errno.ENOSPC: ("no space is left on its disk", "free some, or name a place on another disk"),
    errno.EDQUOT: ("this user's share of its disk is used up", "free some, or name another place"),
    errno.ENOTDIR: ("a folder was expected, and a file lies on the way there", "move the file, or name another place"),
    errno.EISDIR: ("a file was expected, and a folder lies there", "name the file within it"),
    errno.EEXIST: ("nothing was expected there, and something lies there", "move it, or name another place"),
    errno.ENOTEMPTY: ("an empty folder was expected", "empty it, or name another place"),
    errno.ENOENT: ("nothing is there", "check the name"),
    errno.ENAMETOOLONG: ("the name is too long for this system", "give a shorter one"),
    errno.EMFILE: ("this process has too many open files", "raise `ulimit -n` and start again"),
    errno.ENFILE: ("this machine has too many open files", "close some programs and start again"),
    errno.ENOMEM: ("this machine has no memory left", "free some and start again"),
    errno.EIO: ("its disk gave an error", "check the disk, or name a place on another one"),
    errno.EADDRINUSE: ("another program listens there", "choose another port, or 0 for a free one"),
    errno.EADDRNOTAVAIL: ("this machine has no such address", "give one of its own, such as 127.0.0.1"),
    errno.ECONNREFUSED: ("nobody answers there", "start what should answer, or check the address"),
}
"""By number: what came, and what to do."""


def explain_os_error(error: OSError) -> str:
    """Example: "runs/a: this user may not use it (Permission denied): change its permissions, or name another place".

    An error without number was raised by us, with its own words.
    """
    if error.errno is None:
        return str(error)
    named = " and ".join(
        os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)
    )
    if isinstance(error, socket.gaierror):
        return f"no machine has that name ({error.strerror}): check it, or give an address"
    said = (error.strerror or os.strerror(error.errno)).partition(" (while attempting")[0]
    came, todo = _MEANINGS.get(error.errno, ("the system refused", "see what it says, and try again"))
    return f"{named}: {came} ({said}): {todo}" if named else f"{came} ({said}): {todo}"
