"""Small contributions and their replies on a direct connection: each is taken, and said, at once where it comes.

A task that is woken for a message, and a future for each reply, cost more than a small exchange itself. So between two
messages of a worker's conversation this reads them in the event loop's own callback. What is anything else is left to
the conversation, as if it had just come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..engine.peers import Go, Item, Peer
from .direct import Connection
from .intake import Intake
from .stream import Stream, StreamLost


class SmallExchanges:
    """Of one worker. `message` is all that is said of an item, or None when that is more than one message."""

    def __init__(
        self,
        connection: Connection,
        stream: Stream,
        peer: Peer,
        intake: Intake,
        message: Callable[[Item], bytes | None],
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._peer = peer
        self._intake = intake
        self._message = message
        self._is_due = False  # a reply
        self._is_paused = False  # something has come before it

    async def until_other(self) -> bool:
        """Returns when something else is to be said, which is in the outbox, or (False) to be read."""
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
        """At most one contribution: others have their turn."""
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
            if not self._intake.take_small(raw):
                self._connection.unread(raw)
                self._end(False)
            elif self._connection.has_more and not self._is_due:
                asyncio.get_running_loop().call_soon(self._readable)
        except EOFError:
            self._end(False)
        except Exception as error:  # the conversation's, as everything that goes wrong in one
            self._fail(error)

    def _say(self, item: Item) -> bool:
        """What the run says, if it can be said here and now."""
        if self._other.done():
            return False
        raw = self._message(item)
        try:
            if raw is None or not self._stream.write_now(raw):
                self._end(True)
                return False
        except StreamLost as lost:
            self._fail(lost)
            return True
        if isinstance(item, Go):
            self._is_due = False
            self._peer.traffic.received(*self._stream.take_sent())
            if self._is_paused:
                self._is_paused = False
                self._connection.watch(self._readable)
                asyncio.get_running_loop().call_soon(self._readable)
        else:
            self._stream.num_in_waiting += len(raw)
        return True

    def _end(self, has_to_say: bool) -> None:
        if not self._other.done():
            self._other.set_result(has_to_say)

    def _fail(self, error: Exception) -> None:
        if not self._other.done():
            self._other.set_exception(error)
