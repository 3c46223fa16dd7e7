"""Passes bytes on to a server, and can lose an answer: the request arrives, the client never hears of it."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class CuttingProxy:
    def __init__(self, port: int) -> None:
        """`port`: of the server, on loopback."""
        self._target, self.num_lost = port, 0
        self._armed: bytes | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def lose_the_answer_to(self, request_line: str) -> None:
        """The next answer to a request whose first line begins so."""
        self._armed = request_line.encode()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._target)) as server, suppress(OSError):
            lose = threading.Event()
            back = threading.Thread(target=self._answer, args=(server, client, lose), daemon=True)
            back.start()
            while data := client.recv(1 << 16):
                if self._armed is not None and data.startswith(self._armed):
                    self._armed = None
                    lose.set()
                server.sendall(data)
            back.join(1)

    def _answer(self, server: socket.socket, client: socket.socket, lose: threading.Event) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                if lose.is_set():
                    self.num_lost += 1
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(data)
            client.shutdown(socket.SHUT_WR)
