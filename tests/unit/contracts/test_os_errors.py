"""What the system refused is told with what to do, and never as a number."""

import errno
import os
import socket
from pathlib import Path

import pytest

from everlong.contracts.os_errors import explain_os_error


def caught(action) -> OSError:
    with pytest.raises(OSError) as raised:
        action()
    return raised.value


def test_a_full_disk_says_what_to_free() -> None:
    def fill() -> None:
        with open("/dev/full", "wb") as file:
            file.write(b"x")

    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    message = explain_os_error(caught(fill))
    assert "no space is left" in message and "free some" in message


def test_a_file_on_the_way_to_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = explain_os_error(caught((tmp_path / "file" / "run").mkdir))
    assert message.startswith(f"{tmp_path}/file/run: a folder was expected, and a file lies on the way there")


def test_a_port_that_is_taken_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        error = caught(lambda: socket.create_server(taken.getsockname()))
    assert explain_os_error(error).startswith("another program listens there (Address already in use): choose another")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EISDIR, errno.EMFILE, errno.EPROTO], ids=str)
def test_no_message_shows_a_number(number: int) -> None:
    message = explain_os_error(OSError(number, os.strerror(number), "runs/a"))
    assert message.startswith("runs/a: ") and os.strerror(number) in message and "Errno" not in message


def test_our_own_words_stay() -> None:
    assert explain_os_error(FileNotFoundError("expected a run's folder")) == "expected a run's folder"
