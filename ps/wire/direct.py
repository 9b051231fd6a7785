"""One direct connection: see `common/wire/direct.py`, and `port.py` for where they are made.

Sockets are read and written on the event loop, without a task or a copy of their own: what has not come yet is waited
for, and a payload is received in the memory that it belongs to. A large one is taken and sent by threads, so that
those of
several workers pass side by side; a thread waits for nobody, so a few do for any number of workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ...common.errors import Reason, refusal
from ...common.wire.direct import LENGTH_BYTES, length_of, shut_down
from ...common.wire.frames import MAX_MESSAGE_BYTES

Result = TypeVar("Result")

_BUFFER_BYTES = 64 << 10
_NUM_THREADS = 4
_LEAST_HANDED_OVER = 256 << 10  # less is sent and received on the loop: a hop costs as much
_MOMENT_MS = 1
# Of a payload so many bytes are waited for at once: whoever is woken costs the sender as much as copying 64 KiB.
_WAKE_BYTES = 512 << 10
_RECORDS_BYTES = 32 << 10
_WAITS = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

_threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="direct")
# Of TLS one takes 0.2 ms, or 1 ms where the worker has a certificate: not the loop's, nor the payloads' threads'.
_handshakes = ThreadPoolExecutor(1, thread_name_prefix="handshake")


class _Waking:
    """How many bytes whoever polls a connection is woken for.

    Nobody may sleep in `recv` on it: with a part of what it wants taken it is woken for so many *new* bytes, which may
    be more than are left.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._num_bytes = 1

    def wait_for(self, num_missing: int) -> None:
        """So many are missing: _WAKE_BYTES at once, or what is left, or the end; 1: whatever comes."""
        # In TLS some of them may have been taken already, in a record that is not whole.
        num_bytes = min(_WAKE_BYTES, num_missing - _RECORDS_BYTES) if num_missing > 2 * _RECORDS_BYTES else 1
        if num_bytes != self._num_bytes:
            self._num_bytes = num_bytes
            with contextlib.suppress(OSError):  # a system that has no such option
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)


class Connection:
    """One socket, used by the task of its stream. Everything raises OSError when the peer is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._descriptor = connection.fileno()
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # what of it has come and was not taken
        self._waiting: set[asyncio.Future[None]] = set()
        self._is_closed = False
        self._num_running = 0  # on threads
        self._waking = _Waking(connection)
        # One thread at a time in what TLS remembers; a bare socket needs none.
        is_tls = isinstance(connection, ssl.SSLSocket)
        self._alone: contextlib.AbstractContextManager[object] = (
            threading.Lock() if is_tls else contextlib.nullcontext()
        )

    @property
    def is_closed(self) -> bool:
        """By this process, or because the call is over."""
        return self._is_closed

    # ---- in ---------------------------------------------------------------------------------

    async def read(self) -> bytes | None:
        """The next message; None at the end."""
        while self._end - self._start < LENGTH_BYTES:
            if not await self._fill():
                return None
        num_bytes = length_of(self._buffer, self._start)
        if num_bytes > MAX_MESSAGE_BYTES:
            raise refusal(
                Reason.LIMIT_EXCEEDED, f"a message of {num_bytes} bytes; at most {MAX_MESSAGE_BYTES} are possible"
            )
        self._start += LENGTH_BYTES
        if num_bytes > _BUFFER_BYTES - LENGTH_BYTES:
            message = bytearray(num_bytes)
            return bytes(message) if await self.receive_into(memoryview(message)) else None
        while self._end - self._start < num_bytes:
            if not await self._fill():
                return None
        start, self._start = self._start, self._start + num_bytes
        return bytes(self._view[start : self._start])

    def read_now(self) -> bytes | None:
        """The next message if it is here, None while it is not whole. EOFError: it is large, or the end, or an error,
        and `read` will say so."""
        try:
            while (left := self._end - self._start) < LENGTH_BYTES or (
                left < (num_bytes := length_of(self._buffer, self._start)) + LENGTH_BYTES
            ):
                if left >= LENGTH_BYTES and num_bytes > _BUFFER_BYTES - LENGTH_BYTES:
                    raise EOFError
                self._make_room()
                with self._alone:
                    came = self._socket.recv_into(self._view[self._end :])
                if not came:
                    raise EOFError
                self._end += came
        except _WAITS:
            return None
        except OSError:
            raise EOFError from None
        start = self._start + LENGTH_BYTES
        self._start = start + num_bytes
        return bytes(self._view[start : self._start])

    def unread(self, message: bytes) -> None:
        """It was read last, and comes again."""
        self._start -= LENGTH_BYTES + len(message)

    @property
    def has_more(self) -> bool:
        """Something has come that the system does not know of any more."""
        if self._end > self._start or not isinstance(self._socket, ssl.SSLSocket):
            return self._end > self._start
        with self._alone:
            return self._socket.pending() > 0

    def watch(self, readable: Callable[[], object]) -> None:
        """Call this whenever something has come."""
        if not self._is_closed:
            self._waking.wait_for(1)  # a large message may have come before
            self._loop.add_reader(self._descriptor, readable)

    def unwatch(self) -> None:
        if not self._is_closed:
            self._loop.remove_reader(self._descriptor)

    async def receive_into(self, target: memoryview) -> bool:
        """Bytes that follow a message; False when they end before."""
        done = min(len(target), self._end - self._start)
        target[:done] = self._view[self._start : self._start + done]
        self._start += done
        while done < len(target):
            num_bytes = await self._receive(target[done:])
            if not num_bytes:
                return False
            done += num_bytes
        return True

    async def _fill(self) -> bool:
        self._make_room()
        num_bytes = await self._receive(self._view[self._end :])
        self._end += num_bytes
        return num_bytes > 0

    def _make_room(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start and self._end == _BUFFER_BYTES:
            left = self._end - self._start
            self._buffer[:left] = self._buffer[self._start : self._end]
            self._start, self._end = 0, left

    async def _receive(self, target: memoryview) -> int:
        self._waking.wait_for(1)
        while True:
            try:
                with self._alone:
                    return self._socket.recv_into(target)
            except _WAITS as error:
                await self._until_it_may(error)

    async def receive_some(self, target: memoryview) -> int:
        """Of the bytes that follow a message, some; 0 at the end. Returns, also when it is cancelled, when nothing
        more is written to `target`."""
        if num_bytes := min(len(target), self._end - self._start):
            target[:num_bytes] = self._view[self._start : self._start + num_bytes]
            self._start += num_bytes
            return num_bytes
        if len(target) < _LEAST_HANDED_OVER:
            return await self._receive(target)
        while True:
            try:
                return await self._on_a_thread(self._take, target)
            except _WAITS as error:
                await self._until_it_may(error)

    def _take(self, target: memoryview) -> int:
        """On a thread: what is here, and what comes within a moment. Raises as recv_into where that is nothing."""
        done = 0
        while done < len(target):
            self._waking.wait_for(len(target) - done)
            try:
                with self._alone:
                    num_bytes = self._socket.recv_into(target[done:])
            except _WAITS:
                if self._may_soon(select.POLLIN):
                    continue
                if not done:
                    raise
                break
            if not num_bytes:
                break
            done += num_bytes
        return done

    # ---- out --------------------------------------------------------------------------------

    def send_now(self, pieces: list[bytes | memoryview]) -> list[bytes | memoryview]:
        """Give the system what it takes; what is left."""
        while pieces:
            try:
                if isinstance(self._socket, ssl.SSLSocket):
                    with self._alone:
                        num_sent = self._socket.send(pieces[0])
                else:
                    num_sent = self._socket.sendmsg(pieces[:64])
            except _WAITS:
                break
            pieces = _after(pieces, num_sent)
        return pieces

    async def send(self, pieces: list[bytes | memoryview]) -> None:
        """Returns when the system has all of it; also when it is cancelled, nothing more is read from `pieces`."""
        while pieces:
            if is_large(pieces):
                pieces = await self._on_a_thread(self._give, pieces)
            else:
                pieces = self.send_now(pieces)
            if pieces:
                await self._wait(self._loop.add_writer, self._loop.remove_writer)

    def _give(self, pieces: list[bytes | memoryview]) -> list[bytes | memoryview]:
        """On a thread: as much as is taken without waiting for more than a moment; what is left."""
        while (pieces := self.send_now(pieces)) and self._may_soon(select.POLLOUT):
            pass
        return pieces

    # ---- waiting ----------------------------------------------------------------------------

    async def _on_a_thread(
        self, work: Callable[..., Result], *what: object, threads: ThreadPoolExecutor = _threads
    ) -> Result:
        """The result of `work`, which waits for nobody. It is over when this returns, also when this is cancelled."""
        running = self._loop.run_in_executor(threads, work, *what)
        self._num_running += 1
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({running})
            running.exception()  # looked at, or asyncio says that nobody has
            raise
        finally:
            self._num_running -= 1
            self._close_unused()

    def _may_soon(self, event: int) -> bool:
        ready = select.poll()
        ready.register(self._descriptor, event)
        return bool(ready.poll(_MOMENT_MS))

    async def _until_it_may(self, error: Exception) -> None:
        """Go on with what would have waited."""
        if isinstance(error, ssl.SSLWantWriteError):
            await self._wait(self._loop.add_writer, self._loop.remove_writer)
        else:
            await self._wait(self._loop.add_reader, self._loop.remove_reader)

    async def _wait(self, add: Callable[..., object], remove: Callable[[int], object]) -> None:
        if self._is_closed:
            raise ConnectionResetError("the connection was closed")
        ready: asyncio.Future[None] = self._loop.create_future()
        add(self._descriptor, _set, ready)
        self._waiting.add(ready)
        try:
            await ready
        finally:
            self._waiting.discard(ready)
            if not self._is_closed:  # its number may be another connection's by now
                remove(self._descriptor)

    def close(self) -> None:
        """At once; the peer reads what was sent, and the end. Whoever waits for it gets a ConnectionError."""
        if self._is_closed:
            return
        self._is_closed = True
        for ready in self._waiting:
            if not ready.done():
                ready.set_exception(ConnectionResetError("the connection was closed"))
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        with contextlib.suppress(OSError):
            shut_down(self._socket, socket.SHUT_RDWR)
        self._close_unused()

    def _close_unused(self) -> None:
        if (
            self._is_closed and not self._num_running
        ):  # a thread would go on with its number, which is another's by then
            self._socket.close()

    async def handshake(self) -> None:
        """TLS, where it is spoken. Raises ssl.SSLError, OSError."""
        if not isinstance(self._socket, ssl.SSLSocket):
            return
        while True:
            try:
                await self._on_a_thread(self._socket.do_handshake, threads=_handshakes)
                return
            except ssl.SSLWantWriteError:
                await self._wait(self._loop.add_writer, self._loop.remove_writer)
            except ssl.SSLWantReadError:
                await self._wait(self._loop.add_reader, self._loop.remove_reader)

    def certificate_name(self) -> str | None:
        """The common name of the peer's certificate, after the handshake; None when it was not asked for one."""
        shown = self._socket.getpeercert() if isinstance(self._socket, ssl.SSLSocket) else None
        if not shown:
            return None
        pairs: Iterable[tuple[str, str]] = itertools.chain.from_iterable(shown["subject"])  # type: ignore[arg-type]
        return "".join(value for key, value in pairs if key == "commonName")


def is_large(pieces: list[bytes | memoryview]) -> bool:
    """Whether they are sent on a thread."""
    return sum(map(len, pieces)) >= _LEAST_HANDED_OVER


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _after(pieces: list[bytes | memoryview], num_bytes: int) -> list[bytes | memoryview]:
    """Without the first `num_bytes`."""
    for index, piece in enumerate(pieces):
        if num_bytes < len(piece):
            return [memoryview(piece)[num_bytes:], *pieces[index + 1 :]]
        num_bytes -= len(piece)
    return []
