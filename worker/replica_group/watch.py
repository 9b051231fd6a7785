"""Whether the processes of a worker are all there: each other one has a connection to group rank 0, which its end
closes, and on which both say several times in a lease that they live. Who is in the middle of its computing, or of an
exchange, hears so as well of one that is gone, and goes at once: the worker is then gone as a whole, and is started
again as a whole. Who has come to the end says so, and may go.
"""

from __future__ import annotations

import os
import queue
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

from ...common.config.cli import report
from ...common.errors import UnreachableError
from ...common.standstill import Standstill

_SAID = struct.Struct("!hd")  # an group rank that is gone, with how long it was silent before; or
_BYE = -1
_LIVES = -2  # with the lease
_HEARTBEATS = 4  # in a lease
_IDLE_S = 1.0  # between two looks where there is no lease yet


class Watch:
    """Group rank 0 `accept`s the others, which `begin` with one connection. `give_up` is called with the error when one
    is gone, on the thread that looks."""

    def __init__(self, rank: int, size: int, give_up: Callable[[UnreachableError], None] | None = None) -> None:
        self._rank, self._size = rank, size
        self._give_up = give_up or _exit
        self._sockets: dict[int, socket.socket] = {}  # by group rank
        self._parts: dict[int, bytes] = {}  # of what each says
        self._lease_s = 0.0  # none yet: who is silent is waited for
        self._is_over = False
        self._lock = threading.Lock()

    def accept(self, peers: queue.SimpleQueue[tuple[int, socket.socket]], timeout_s: float) -> None:
        """Take the connections of all others, who have proved that they are of this worker. queue.Empty when one does
        not come."""
        until = time.monotonic() + timeout_s
        found: dict[int, socket.socket] = {}
        while len(found) < self._size - 1:
            rank, item = peers.get(timeout=max(0.0, until - time.monotonic()))
            if 0 < rank < self._size:
                found[rank] = item
        self.begin(found)

    def begin(self, connections: dict[int, socket.socket]) -> None:
        """Look at these from now on, by group rank."""
        self._sockets = connections
        if connections:
            threading.Thread(target=self._look, daemon=True, name="inner-watch").start()

    def expect(self, lease_s: float) -> None:
        """Group rank 0's: from here on nobody may be silent for longer. The others hear it with its signs of life."""
        self._lease_s = lease_s
        self._say(_LIVES, lease_s)  # at once: else who stands still before the first look is missed by nobody

    def _look(self) -> None:
        heard = dict.fromkeys(self._sockets, time.monotonic())  # when, of whom there is still something to hear
        heartbeat_at, standstill = 0.0, Standstill(_IDLE_S)
        with selectors.DefaultSelector() as selector:
            for rank, socket in self._sockets.items():
                selector.register(socket, selectors.EVENT_READ, rank)
            while heard and not self._is_over:
                left_s = heartbeat_at - time.monotonic() if self._lease_s else _IDLE_S
                ready = selector.select(max(0.0, left_s))
                now, lease_s = time.monotonic(), self._lease_s
                standstill.look_s = lease_s / _HEARTBEATS if lease_s else _IDLE_S
                pause_s = standstill.look(now)  # perhaps all stood still
                heard = {rank: min(now, at + pause_s) if lease_s else now for rank, at in heard.items()}
                for key, _ in ready:
                    heard[key.data] = now
                    if self._is_last(key.data):
                        selector.unregister(key.fileobj)
                        del heard[key.data]
                if lease_s and now >= heartbeat_at:
                    self._say(_LIVES, lease_s)
                    heartbeat_at = now + lease_s / _HEARTBEATS
                for rank, at in heard.items():
                    if lease_s and now - at > lease_s:
                        self._lost(rank, now - at)

    def _is_last(self, rank: int) -> bool:
        """Hear what it says; whether it has said all that it will."""
        try:
            said = self._sockets[rank].recv(1 << 12)
        except OSError:
            said = b""
        if not said:
            self._lost(rank)
            return True
        said = self._parts.get(rank, b"") + said
        whole = len(said) - len(said) % _SAID.size
        self._parts[rank] = said[whole:]
        for what, seconds in _SAID.iter_unpack(said[:whole]):
            if what == _BYE:
                return True
            if what == _LIVES:
                self._lease_s = seconds
            else:
                self._lost(what, seconds)
        return False

    def _lost(self, gone: int, silent_s: float = 0.0) -> None:
        if self._is_over:
            return
        self._say(gone, silent_s)
        whom = f"group rank {self._rank}: group rank {gone} of this worker's {self._size} processes"
        told, why = f"{whom} has ended, and with it the worker", "its own last lines say why it ended"
        if silent_s:
            lease = f"(server.lease_s is {self._lease_s:g})"
            told = f"{whom} was not heard of for {silent_s:.1f} s {lease}, and the worker ends"
            why = "see whether its host is there, and what has stopped it"
        self._give_up(UnreachableError(told, fix=f"{why}; torchrun and ps-launch start all of them again"))

    def _say(self, what: int, seconds: float = 0.0) -> None:
        with self._lock:
            for socket in self._sockets.values():
                try:
                    socket.sendall(_SAID.pack(what, seconds))
                except OSError:
                    continue

    def end(self) -> None:
        """Each may go from here on."""
        if not self._is_over:
            self._is_over = True
            self._say(_BYE)


def _exit(error: UnreachableError) -> None:
    """At once: whatever the others would wait for, and the server's connection, end with the process."""
    code = report("paramserver", error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
