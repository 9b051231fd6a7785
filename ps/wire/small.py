"""Small contributions on a direct connection: the event loop's callback receives each one and sends its reply.

Waking a task for a message and resolving a future for a reply would cost more than a small exchange itself. All other
messages are left for the worker's conversation, which reads them from the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..engine.peers import Go, Item, Peer
from .connection import Connection
from .receiver import Receiver
from .stream import Stream, StreamLost


class SmallExchanges:
    """The small exchanges of one worker. `message` returns the message of an item, or None if it needs several."""

    def __init__(
        self,
        connection: Connection,
        stream: Stream,
        peer: Peer,
        receiver: Receiver,
        message: Callable[[Item], bytes | None],
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._peer = peer
        self._receiver = receiver
        self._message = message
        self._is_due = False  # the worker waits for a reply
        self._is_paused = False  # bytes arrived before the reply was sent

    async def until_other(self) -> bool:
        """Exchange until the conversation must take over. Returns True if it must send, and False if it must read."""
        loop = asyncio.get_running_loop()
        self._other: asyncio.Future[bool] = loop.create_future()
        self._is_due = self._is_paused = False
        self._peer.at_once = self._say
        self._connection.watch(self._readable)
        try:
            if self._connection.has_more:
                loop.call_soon(self._readable)
            return await self._other
        finally:
            self._peer.at_once = None
            self._connection.unwatch()

    def _readable(self) -> None:
        """Receive at most one contribution, so that other workers get their turn."""
        if self._other.done():
            return
        if self._is_due:
            self._is_paused = True
            self._connection.unwatch()
            return
        try:
            raw = self._connection.read_now()
            if raw is None:
                return
            self._is_due = True
            if not self._stream.take_now(raw, self._receiver.take_now):
                self._connection.unread(raw)
                self._end(False)
            elif self._connection.has_more and not self._is_due:
                asyncio.get_running_loop().call_soon(self._readable)
        except EOFError:
            self._end(False)
        except Exception as error:  # the conversation handles it
            self._fail(error)

    def _say(self, item: Item) -> bool:
        """Send an item of the run at once. Returns False if the conversation must send it."""
        if self._other.done():
            return False
        raw, is_reply = self._message(item), isinstance(item, Go)
        try:
            if raw is None or not self._stream.write_now(raw, is_counted=is_reply):
                self._end(True)
                return False
        except StreamLost as lost:
            self._fail(lost)
            return True
        if is_reply:
            self._is_due = False
            self._peer.traffic.num_received += self._stream.pop_bytes_written()
            if self._is_paused:
                self._is_paused = False
                self._connection.watch(self._readable)
                asyncio.get_running_loop().call_soon(self._readable)
        return True

    def _end(self, has_to_say: bool) -> None:
        if not self._other.done():
            self._other.set_result(has_to_say)

    def _fail(self, error: Exception) -> None:
        if not self._other.done():
            self._other.set_exception(error)
