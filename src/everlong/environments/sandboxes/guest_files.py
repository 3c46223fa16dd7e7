"""Reads or writes one file inside a sandbox of gVisor, as the agent's user: `python3 -I -S guest_files.py OP PATH MAX FOLDER...`.

Content goes over standard input and output. Exit codes: 0, 3 for a file that is not there, 4 for a path that leads out of the
folders, 5 for anything else; the last two say why.
"""

import errno
import os
import stat
import sys

ABSENT, OUTSIDE, REFUSED = 3, 4, 5


def check_inside(path, folders):
    real = os.path.realpath(path)
    if not any(real == folder or real.startswith(folder + "/") for folder in folders):
        sys.stdout.write(
            f"{path} leads to {real}, out of what can be read and written from outside: {', '.join(folders)}"
        )
        sys.exit(OUTSIDE)
    return real


def read(path, size):
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        sys.exit(ABSENT)
    with open(fd, "rb") as file:
        sys.stdout.buffer.write(file.read(size))


def write(path, folders):
    os.umask(0o022)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.lexists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "it is not a regular file, remove it first")
    check_inside(path, folders)
    with open(path, "wb") as file:
        file.write(sys.stdin.buffer.read())


def main():
    op, path, size, *folders = sys.argv[1:]
    try:
        real = check_inside(path, folders)
        if op == "read":
            read(real, int(size))
        else:
            write(real, folders)
    except (FileNotFoundError, NotADirectoryError):
        sys.exit(ABSENT)
    except OSError as error:
        sys.stdout.write(str(error.strerror))
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
