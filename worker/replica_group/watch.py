"""Detects that a process of a worker has ended or hangs.

Each process has a connection to group rank 0, which closes when the process ends. Both sides send several heartbeats
per lease on it. A process that notices the loss of another ends at once, even in the middle of computing or of an
exchange. So the worker ends as a whole, and starts again as a whole. A process says goodbye at the end of its loop.
"""

from __future__ import annotations

import queue
import selectors
import socket
import struct
import threading
import time

from ...common.errors import UnreachableError
from ...common.standstill import Standstill
from ..training.ending import exit_at_once

_MESSAGE = struct.Struct("!hd")  # the rank of a lost process and the seconds of its silence, or a code below
_BYE = -1
_ALIVE = -2  # with the lease in seconds
_HEARTBEATS = 4  # per lease
_IDLE_S = 1.0  # between two looks before there is a lease


class Watch:
    """Watches the connections of a replica group.

    Group rank 0 calls `accept` for the connections of the others. Each of these calls `begin` with one connection. The
    watching thread ends this process when another one is lost.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._sockets: dict[int, socket.socket] = {}  # by group rank
        self._parts: dict[int, bytes] = {}  # incomplete messages, by group rank
        self._lease_s = 0.0  # 0: there is no lease yet, so silence is allowed
        self._is_over = False
        self._lock = threading.Lock()

    def accept(self, peers: queue.SimpleQueue[tuple[int, socket.socket]], timeout_s: float) -> None:
        """Take the connections of all others, whose proofs were checked. Raises queue.Empty if one does not arrive."""
        until = time.monotonic() + timeout_s
        found: dict[int, socket.socket] = {}
        while len(found) < self._size - 1:
            rank, item = peers.get(timeout=max(0.0, until - time.monotonic()))
            if 0 < rank < self._size:
                found[rank] = item
        self.begin(found)

    def begin(self, connections: dict[int, socket.socket]) -> None:
        """Watch these connections, given by group rank, from now on."""
        self._sockets = connections
        if connections:
            threading.Thread(target=self._look, daemon=True, name="group-watch").start()

    def expect(self, lease_s: float) -> None:
        """Group rank 0: from now on, no process may be silent for longer than the lease. Heartbeats tell the others."""
        self._lease_s = lease_s
        self._send(_ALIVE, lease_s)  # sent at once, to notice a process that stops before the first look

    def _look(self) -> None:
        last_seen = dict.fromkeys(self._sockets, time.monotonic())  # without processes that said goodbye
        heartbeat_at, standstill = 0.0, Standstill(_IDLE_S)
        with selectors.DefaultSelector() as selector:
            for rank, socket in self._sockets.items():
                selector.register(socket, selectors.EVENT_READ, rank)
            while last_seen and not self._is_over:
                left_s = heartbeat_at - time.monotonic() if self._lease_s else _IDLE_S
                ready = selector.select(max(0.0, left_s))
                now, lease_s = time.monotonic(), self._lease_s
                standstill.look_s = lease_s / _HEARTBEATS if lease_s else _IDLE_S
                pause_s = standstill.look(now)  # this process may have been paused itself
                last_seen = {rank: min(now, at + pause_s) if lease_s else now for rank, at in last_seen.items()}
                for key, _ in ready:
                    last_seen[key.data] = now
                    if self._is_last(key.data):
                        selector.unregister(key.fileobj)
                        del last_seen[key.data]
                if lease_s and now >= heartbeat_at:
                    self._send(_ALIVE, lease_s)
                    heartbeat_at = now + lease_s / _HEARTBEATS
                for rank, at in last_seen.items():
                    if lease_s and now - at > lease_s:
                        self._lost(rank, now - at)

    def _is_last(self, rank: int) -> bool:
        """Read the messages of a process. Returns True after its last one."""
        try:
            received = self._sockets[rank].recv(1 << 12)
        except OSError:
            received = b""
        if not received:
            self._lost(rank)
            return True
        received = self._parts.get(rank, b"") + received
        whole = len(received) - len(received) % _MESSAGE.size
        self._parts[rank] = received[whole:]
        for word, seconds in _MESSAGE.iter_unpack(received[:whole]):
            if word == _BYE:
                return True
            if word == _ALIVE:
                self._lease_s = seconds
            else:
                self._lost(word, seconds)
        return False

    def _lost(self, departed: int, silent_s: float = 0.0) -> None:
        if self._is_over:
            return
        self._send(departed, silent_s)
        whom = f"group rank {self._rank}: group rank {departed} of this worker's {self._size} processes"
        message, why = f"{whom} has ended, and with it the worker", "its own last log lines say why it ended"
        if silent_s:
            lease = f"(server.lease_s is {self._lease_s:g})"
            message = f"{whom} was silent for {silent_s:.1f} s {lease}, so the worker ends"
            why = "see whether its host is reachable, and what has stopped it"
        # At once, so that no other process waits for this one.
        exit_at_once(UnreachableError(message, fix=f"{why}; torchrun and ps-launch start all of them again"))

    def _send(self, word: int, seconds: float = 0.0) -> None:
        with self._lock:
            for socket in self._sockets.values():
                try:
                    socket.sendall(_MESSAGE.pack(word, seconds))
                except OSError:
                    continue

    def end(self) -> None:
        """From now on any process may end."""
        if not self._is_over:
            self._is_over = True
            self._send(_BYE)
