"""Whether the processes of a worker are all there: each other one has a connection to inner rank 0 that only its end
closes. Who is in the middle of its computing, or of an exchange, hears of it so as well, and goes at once: the worker
is then gone as a whole, and is started again as a whole. Who has come to the end says so, and may go.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import threading
from collections.abc import Callable

from ...common.config.cli import report
from ...common.errors import UnreachableError

_BYE = 0xFF  # as a byte; any other says that the inner rank of this number is gone


class Watch:
    """`leader`: where inner rank 0 listens; for inner rank 0 itself `begin` is enough."""

    def __init__(self, rank: int, size: int, give_up: Callable[[str], None] | None = None) -> None:
        self._rank, self._size = rank, size
        self._give_up = give_up or _exit
        self._sockets: dict[int, socket.socket] = {}  # by inner rank
        self._is_over = False
        self._lock = threading.Lock()

    def listen(self, host: str) -> tuple[socket.socket, str]:
        """Inner rank 0's: the others connect to HOST:PORT."""
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        return listener, f"{host}:{listener.getsockname()[1]}"

    def accept(self, listener: socket.socket, timeout_s: float) -> None:
        """All others connect. OSError when one does not."""
        listener.settimeout(timeout_s)
        with listener:
            while len(self._sockets) < self._size - 1:
                one, _ = listener.accept()
                one.settimeout(timeout_s)
                rank = one.recv(1)
                if rank:
                    self._sockets[rank[0]] = one
        self._begin()

    def connect(self, address: str, timeout_s: float) -> None:
        host, _, port = address.rpartition(":")
        one = socket.create_connection((host, int(port)), timeout_s)
        one.sendall(bytes([self._rank]))
        self._sockets[0] = one
        self._begin()

    def _begin(self) -> None:
        for one in self._sockets.values():
            one.settimeout(None)
        if self._sockets:
            threading.Thread(target=self._look, daemon=True, name="inner-watch").start()

    def _look(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, one in self._sockets.items():
                selector.register(one, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    try:
                        said = key.fileobj.recv(1)  # type: ignore[union-attr]
                    except OSError:
                        said = b""
                    selector.unregister(key.fileobj)
                    if self._is_over or said == bytes([_BYE]):
                        continue
                    self._lost(said[0] if said else key.data)

    def _lost(self, gone: int) -> None:
        self._say(gone)
        self._give_up(
            f"inner rank {self._rank}: inner rank {gone} of this worker's {self._size} processes has ended, and with "
            "it the worker"
        )

    def _say(self, what: int) -> None:
        with self._lock:
            for one in self._sockets.values():
                try:
                    one.sendall(bytes([what]))
                except OSError:
                    continue

    def end(self) -> None:
        """Each may go from here on."""
        if not self._is_over:
            self._is_over = True
            self._say(_BYE)


def _exit(told: str) -> None:
    """At once: whatever the others would wait for, and the server's connection, end with the process."""
    error = UnreachableError(
        told, fix="its own last lines say why it ended; torchrun and ps-launch start all of them again"
    )
    code = report("paramserver", error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
