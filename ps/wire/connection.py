"""One direct connection of a worker. `common/wire/direct.py` has the format, and `port.py` accepts connections.

The event loop itself transfers small messages. Threads transfer large payloads, straight into their final memory. A
thread returns after `_MOMENT_MS` without progress, so a few threads serve any number of workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from ...common.errors import Reason, refusal
from ...common.wire.direct import (
    LENGTH_BYTES,
    WAKE_BYTES,
    LowWater,
    Pieces,
    decode_length,
    drop_front,
    shut_down,
    take_front,
)
from ...common.wire.frames import MAX_MESSAGE_BYTES

Result = TypeVar("Result")

LEAST_HANDED_OVER = 256 << 10  # the loop transfers less itself, as the change to a thread would cost as much
_BUFFER_BYTES = 64 << 10
_NUM_THREADS = 4
_MOMENT_MS = 1
_RECORDS_BYTES = 32 << 10  # bytes that TLS may have read already, as part of an incomplete record
_WAITS = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

_threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="direct")
# A TLS handshake takes 0.2 ms, or 1 ms where the worker has a certificate: too long for the loop.
_handshakes = ThreadPoolExecutor(1, thread_name_prefix="handshake")


class Connection:
    """One socket, used by the task of its stream.

    If the peer has closed it, `read` returns None, `receive_into` False and `receive_some` 0, and `read_now` raises
    EOFError. If it is broken, `read_now` raises EOFError, and the other methods that transfer bytes raise OSError.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._descriptor = connection.fileno()
        self._loop = asyncio.get_running_loop()
        self._view = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0  # range of received bytes in the buffer that are not used yet
        self._is_next_large = False  # the next message is larger than the buffer
        self._waiting: set[asyncio.Event] = set()
        self.is_closed = False  # by this process, also at the end of the call
        self._num_running = 0  # calls on threads
        self._low_water = LowWater(connection)  # no thread blocks in `recv`
        self._lock = threading.Lock()  # of TLS, whose state allows only one thread at a time
        is_tls = isinstance(connection, ssl.SSLSocket)
        self._receive: Callable[[memoryview], int] = self._receive_alone if is_tls else connection.recv_into

    # ---- in ---------------------------------------------------------------------------------

    async def read(self) -> bytes | None:
        """Return the next message, or None at the end of the connection."""
        while (message := self._take_message()) is None:
            if self._is_next_large:
                num_bytes = decode_length(self._view, self._start)
                if num_bytes > MAX_MESSAGE_BYTES:
                    problem = f"a message of {num_bytes} bytes; at most {MAX_MESSAGE_BYTES} are possible"
                    raise refusal(Reason.LIMIT_EXCEEDED, problem)
                self._start += LENGTH_BYTES
                large = bytearray(num_bytes)
                return bytes(large) if await self.receive_into(memoryview(large)) else None
            self._low_water.set(1)
            if not await self._retry(self._fill):
                return None
        return message

    def read_now(self) -> bytes | None:
        """Return the next message, or None if it has not arrived completely.

        Raises EOFError if the caller must use `read`: a large message, the end, or an error.
        """
        try:
            while (message := self._take_message()) is None:
                if self._is_next_large or not self._fill():
                    raise EOFError
        except _WAITS:
            return None
        except OSError:
            raise EOFError from None
        return message

    def _take_message(self) -> bytes | None:
        """Return the next message if all of it is in the buffer, else None. Notes whether it exceeds the buffer."""
        start = self._start + LENGTH_BYTES
        num_bytes = decode_length(self._view, self._start) if start <= self._end else 0
        self._is_next_large = LENGTH_BYTES + num_bytes > _BUFFER_BYTES
        if start + num_bytes > self._end:
            return None
        self._start = start + num_bytes
        return bytes(self._view[start : self._start])

    def unread(self, message: bytes) -> None:
        """Put the last message back into the buffer."""
        self._start -= LENGTH_BYTES + len(message)

    @property
    def has_more(self) -> bool:
        """Whether received bytes are in the buffer or in TLS, for which the kernel reports nothing."""
        if self._end > self._start or not isinstance(self._socket, ssl.SSLSocket):
            return self._end > self._start
        with self._lock:
            return self._socket.pending() > 0

    def watch(self, readable: Callable[[], object]) -> None:
        """Call `readable` whenever bytes arrive."""
        if not self.is_closed:
            self._low_water.set(1)  # a large message before this may have set another SO_RCVLOWAT
            self._loop.add_reader(self._descriptor, readable)

    def unwatch(self) -> None:
        """Stop calling the function of `watch`."""
        if not self.is_closed:
            self._loop.remove_reader(self._descriptor)

    async def receive_into(self, target: memoryview) -> bool:
        """Fill `target` with the bytes that follow a message. Returns False if the connection ends before."""
        done = 0
        while done < len(target):
            num_bytes = await self.receive_some(target[done:])
            if not num_bytes:
                return False
            done += num_bytes
        return True

    async def receive_some(self, target: memoryview) -> int:
        """Receive some of the bytes that follow a message, and return their number, or 0 at the end.

        A cancelled call also returns only once no thread writes to `target`.
        """
        if num_bytes := min(len(target), self._end - self._start):
            target[:num_bytes] = self._view[self._start : self._start + num_bytes]
            self._start += num_bytes
            return num_bytes
        if len(target) < LEAST_HANDED_OVER:
            self._low_water.set(1)
            return await self._retry(partial(self._receive, target))
        return await self._retry(partial(self._receive_for_a_moment, target), _threads)

    def _fill(self) -> bool:
        """Receive into the buffer. Returns False at the end."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start and self._end == _BUFFER_BYTES:
            unread = bytes(self._view[self._start : self._end])
            self._view[: len(unread)] = unread
            self._start, self._end = 0, len(unread)
        num_bytes = self._receive(self._view[self._end :])
        self._end += num_bytes
        return num_bytes > 0

    def _receive_alone(self, target: memoryview) -> int:
        with self._lock:
            return self._socket.recv_into(target)

    def _receive_for_a_moment(self, target: memoryview) -> int:
        """On a thread: receive the available bytes, and those that arrive within _MOMENT_MS of each other.

        Raises the exception of recv_into if there are none. An error after some bytes shows at the next call.
        """
        done = 0
        while done < len(target):
            missing = len(target) - done
            self._low_water.set(min(WAKE_BYTES, missing - _RECORDS_BYTES) if missing > 2 * _RECORDS_BYTES else 1)
            try:
                num_bytes = self._receive(target[done:])
            except OSError as error:
                if isinstance(error, _WAITS) and self._may_soon(select.POLLIN):
                    continue
                if not done:
                    raise
                break
            if not num_bytes:
                break
            done += num_bytes
        return done

    # ---- out --------------------------------------------------------------------------------

    def send_now(self, pieces: Pieces) -> Pieces:
        """Send as much as the system accepts at once, and return the rest."""
        while pieces:
            try:
                if isinstance(self._socket, ssl.SSLSocket):
                    with self._lock:
                        num_sent = self._socket.send(pieces[0])
                else:
                    num_sent = self._socket.sendmsg(take_front(pieces))
            except _WAITS:
                break
            pieces = drop_front(pieces, num_sent)
        return pieces

    async def send(self, pieces: Pieces, progress: Callable[[int], object] = lambda _: None) -> None:
        """Send all pieces, and call `progress` with the number of bytes that the system has accepted each time.

        Once this returns or is cancelled, no thread reads from `pieces`.
        """
        while pieces:
            num_bytes = sum(map(len, pieces))
            if num_bytes >= LEAST_HANDED_OVER:
                pieces = await self._on_a_thread(_threads, partial(self._send_for_a_moment, pieces))
            else:
                pieces = self.send_now(pieces)
            progress(num_bytes - sum(map(len, pieces)))
            if pieces:
                await self._wait(is_to_send=True)

    def _send_for_a_moment(self, pieces: Pieces) -> Pieces:
        """On a thread: send as long as the system accepts more within _MOMENT_MS, and return the rest."""
        while (pieces := self.send_now(pieces)) and self._may_soon(select.POLLOUT):
            pass
        return pieces

    # ---- waiting ----------------------------------------------------------------------------

    async def _retry(self, work: Callable[[], Result], threads: ThreadPoolExecutor | None = None) -> Result:
        """Return the result of `work`, on the loop or on a thread. Calls it again whenever the socket is ready."""
        while True:
            try:
                return work() if threads is None else await self._on_a_thread(threads, work)
            except _WAITS as error:
                await self._wait(is_to_send=isinstance(error, ssl.SSLWantWriteError))

    async def _on_a_thread(self, threads: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
        """Return the result of `work`. A cancelled call also waits for the end of `work`."""
        running = self._loop.run_in_executor(threads, work)
        self._num_running += 1
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({running})
            running.exception()  # otherwise asyncio warns that the exception was never retrieved
            raise
        finally:
            self._num_running -= 1
            self._close_unused()

    def _may_soon(self, event: int) -> bool:
        ready = select.poll()
        ready.register(self._descriptor, event)
        return bool(ready.poll(_MOMENT_MS))

    async def _wait(self, is_to_send: bool) -> None:
        """Wait until the socket is ready to send, or has bytes to receive. Raises ConnectionError if it is closed."""
        if not self.is_closed:
            loop, ready = self._loop, asyncio.Event()
            (loop.add_writer if is_to_send else loop.add_reader)(self._descriptor, ready.set)
            self._waiting.add(ready)
            try:
                await ready.wait()
            finally:
                self._waiting.discard(ready)
                if not self.is_closed:  # after a close, the descriptor may belong to another connection
                    (loop.remove_writer if is_to_send else loop.remove_reader)(self._descriptor)
        if self.is_closed:
            raise ConnectionResetError("the connection was closed")

    def close(self) -> None:
        """Close at once. The peer reads the bytes that were sent, then the end. Waiting calls raise ConnectionError."""
        if self.is_closed:
            return
        self.is_closed = True
        for ready in self._waiting:
            ready.set()
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        with contextlib.suppress(OSError):
            shut_down(self._socket, socket.SHUT_RDWR)
        self._close_unused()

    def _close_unused(self) -> None:
        """Close the socket unless a thread still uses its descriptor. A new socket could get the same descriptor."""
        if self.is_closed and not self._num_running:
            self._socket.close()

    async def handshake(self) -> None:
        """Do the TLS handshake, if the socket uses TLS. Raises ssl.SSLError and OSError."""
        if isinstance(self._socket, ssl.SSLSocket):
            await self._retry(self._socket.do_handshake, _handshakes)

    def certificate_name(self) -> str | None:
        """Return the common name of the peer's certificate after the handshake, or None without a certificate."""
        certificate = self._socket.getpeercert() if isinstance(self._socket, ssl.SSLSocket) else None
        if not certificate:
            return None
        subject: Any = certificate["subject"]  # names, each of several (key, value)
        return "".join(value for name in subject for key, value in name if key == "commonName")
