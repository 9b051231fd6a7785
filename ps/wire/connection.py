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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from ...common.wire.direct import WAITS, DirectSocket, Pieces

Result = TypeVar("Result")

LEAST_HANDED_OVER = 256 << 10  # the loop transfers less itself, as the change to a thread would cost as much
_NUM_THREADS = 4
_MOMENT_MS = 1

_threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="direct")
# A TLS handshake takes 0.2 ms, or 1 ms where the worker has a certificate: too long for the loop.
_handshakes = ThreadPoolExecutor(1, thread_name_prefix="handshake")


class Connection(DirectSocket):
    """One socket, used by the task of its stream.

    If the peer has closed it, `read` returns None, `receive_into` False and `receive_some` 0. If it is broken, these
    raise OSError. `read_now` raises EOFError in both cases.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Event] = set()
        self.is_closed = False  # by this process, also at the end of the call
        self._num_running = 0  # calls on threads

    # ---- in ---------------------------------------------------------------------------------

    async def read(self) -> bytes | bytearray | None:
        """Return the next message, or None at the end of the connection."""
        num_bytes = 0
        while (message := self.next_message(num_bytes)) is None:
            if not (num_bytes := await self._receive_more(self.free)):
                return None
        return message

    def watch(self, readable: Callable[[], object]) -> None:
        """Call `readable` whenever bytes arrive."""
        if not self.is_closed:
            self.wake_for(1)  # a large message before this may have set another SO_RCVLOWAT
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
        return self.take(target) or await self._receive_more(target)

    async def _receive_more(self, target: memoryview) -> int:
        if len(target) < LEAST_HANDED_OVER:
            self.wake_for(1)
            return await self._retry(partial(self._receive, target))
        return await self._retry(partial(self._receive_for_a_moment, target), _threads)

    def _receive_for_a_moment(self, target: memoryview) -> int:
        """On a thread: receive the available bytes, and those that arrive within _MOMENT_MS of each other.

        Raises the exception of recv_into if there are none. An error after some bytes shows at the next call.
        """
        done = 0
        while done < len(target):
            self.wake_for(len(target) - done)
            try:
                num_bytes = self._receive(target[done:])
            except OSError as error:
                if isinstance(error, WAITS) and self._may_soon(select.POLLIN):
                    continue
                if not done:
                    raise
                break
            if not num_bytes:
                break
            done += num_bytes
        return done

    # ---- out --------------------------------------------------------------------------------

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
            except WAITS as error:
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
        self.shut_down(socket.SHUT_RDWR)
        self._close_unused()

    def _close_unused(self) -> None:
        """Close the socket unless a thread still uses its descriptor. A new socket could get the same descriptor."""
        if self.is_closed and not self._num_running:
            self._socket.close()

    async def handshake(self) -> None:
        """Do the TLS handshake, if the socket uses TLS. Raises ssl.SSLError and OSError."""
        if self._tls is not None:
            await self._retry(self._tls.do_handshake, _handshakes)

    def certificate_name(self) -> str | None:
        """Return the common name of the peer's certificate after the handshake, or None without a certificate."""
        certificate = self._tls.getpeercert() if self._tls is not None else None
        if not certificate:
            return None
        subject: Any = certificate["subject"]  # names, each of several (key, value)
        return "".join(value for name in subject for key, value in name if key == "commonName")
