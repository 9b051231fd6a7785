"""A TCP proxy that does to connections what networks do: resets them, stalls them, loses one direction.

    with Proxy("127.0.0.1:50051", plan=lambda number: Plan(reset_after_up=100_000)) as proxy:
        ... clients connect to proxy.address ...

With `direct_port` the server's port for direct connections has the same number at the proxy's host, 127.0.0.2 then.
A plan is made for each connection, by its number from 0. A reset is a real one (RST, no FIN): the peers lose what
was on its way. Needs no root.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

_PIECE = 16 << 10


@dataclass
class Plan:
    """What happens to one connection. Bytes are counted from its beginning; None: never."""

    reset_after_up: int | None = None  # client to server: these many pass, then the connection is reset
    reset_after_down: int | None = None
    lose_after_up: int | None = None  # what is said from there on does not arrive; the end of the connection does
    delay_up_s: float = 0.0  # so long every byte is on its way, however many are
    delay_down_s: float = 0.0


@dataclass(eq=False)
class _Connection:
    number: int
    plan: Plan
    client: socket.socket
    server: socket.socket
    port: int  # of the server
    up: int = 0  # bytes passed
    down: int = 0
    is_reset: threading.Event = field(default_factory=threading.Event)

    def reset(self) -> bool:
        """Both ends get RST; False when that has happened already."""
        if self.is_reset.is_set():
            return False
        self.is_reset.set()
        self.wake()
        return True

    def wake(self) -> None:
        """The threads that read; nothing is sent for it. An end that is closed while a thread reads it stays open."""
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RD)


class _Line:
    """Bytes that are said now arrive `delay_s` later, in order; any number of them is on its way."""

    def __init__(self, sink: socket.socket, delay_s: float) -> None:
        self._sink, self._delay_s = sink, delay_s
        self._on_its_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._arrive, daemon=True)
        self._thread.start()

    def say(self, data: bytes) -> None:
        self._on_its_way.put((time.monotonic() + self._delay_s, data))

    def end(self) -> None:
        """Returns when all has arrived."""
        self.say(b"")
        self._thread.join()

    def _arrive(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = self._on_its_way.get()
                time.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    return
                self._sink.sendall(data)


class Proxy:
    """Listens on a free port of `host` and passes on to `target`, HOST:PORT. Two threads a connection."""

    def __init__(
        self, target: str, plan: Callable[[int], Plan] = lambda _: Plan(), direct_port: int = 0, host: str = ""
    ) -> None:
        server, _, port = target.rpartition(":")
        self.plan = plan
        here = host or ("127.0.0.2" if direct_port else "127.0.0.1")
        self._listeners = {socket.create_server((here, 0)): (server, int(port))}
        self.address = f"{here}:{next(iter(self._listeners)).getsockname()[1]}"
        if direct_port:
            self._listeners[socket.create_server((here, direct_port))] = (server, direct_port)
        self.connections: list[_Connection] = []
        self.num_resets_up = 0
        self.num_resets_down = 0
        self._open = threading.Event()  # cleared: nothing passes, in any connection
        self._open.set()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        for listener, target in self._listeners.items():
            threading.Thread(target=self._accept, args=(listener, target), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for listener in self._listeners:
            listener.close()
        self._open.set()
        self.reset_all()

    @property
    def num_resets(self) -> int:
        return self.num_resets_up + self.num_resets_down

    def reset_all(self) -> None:
        """Every open connection, now."""
        for connection in self.connections:
            connection.reset()

    def stall(self) -> None:
        """Nothing passes until `go_on`; connections stay open."""
        self._open.clear()

    def go_on(self) -> None:
        self._open.set()

    def _accept(self, listener: socket.socket, target: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                client, _ = listener.accept()
                try:
                    server = socket.create_connection(target, timeout=5)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    number = len(self.connections)
                    connection = _Connection(number, self.plan(number), client, server, target[1])
                    self.connections.append(connection)
                for is_up in (True, False):
                    threading.Thread(target=self._pass_on, args=(connection, is_up), daemon=True).start()

    def _pass_on(self, connection: _Connection, is_up: bool) -> None:
        """One direction of one connection, until either end closes it or its time has come."""
        source, sink = (connection.client, connection.server) if is_up else (connection.server, connection.client)
        plan = connection.plan
        delay_s, limit = plan.delay_down_s, plan.reset_after_down
        if is_up:
            delay_s, limit = plan.delay_up_s, plan.reset_after_up
        line = _Line(sink, delay_s) if delay_s else None
        say = sink.sendall if line is None else line.say
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE):
                self._open.wait()
                passed = connection.up if is_up else connection.down
                is_last = limit is not None and passed + len(data) >= limit
                if is_last:
                    data = data[: limit - passed]
                if is_up and plan.lose_after_up is not None:
                    data = data[: max(0, plan.lose_after_up - passed)]
                say(data)
                if is_up:
                    connection.up += len(data)
                else:
                    connection.down += len(data)
                if is_last:
                    self._reset(connection, is_up)
                    break
        if line is not None:
            line.end()
        self._close(connection, source, sink)

    def _reset(self, connection: _Connection, is_up: bool) -> None:
        with self._lock:
            if connection.reset():
                if is_up:
                    self.num_resets_up += 1
                else:
                    self.num_resets_down += 1

    def _close(self, connection: _Connection, source: socket.socket, sink: socket.socket) -> None:
        """The source has ended: the sink is told the same way. The second of the two threads closes."""
        if connection.is_reset.is_set():
            connection.wake()  # whoever resets may have got to one end so far
            for end in (source, sink):
                end.close()  # with lingering of 0 s: RST
            return
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
