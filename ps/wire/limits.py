"""What one peer may take of the server's time: joins, bytes of uploads, and how long others wait for it.

Messages pass without a timer: a stream notes since when it has been waiting, and `Watch` looks at all
streams five times a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol, TypeVar

from ...common.errors import Reason, refusal
from ...common.standstill import Standstill

Message = TypeVar("Message")

LOOK_S = 0.2
_LOG_INTERVAL_S = 1.0


class Pace:
    """A token bucket: `per_s` in a second, `burst_s` seconds' worth at once."""

    def __init__(self, per_s: float, now: Callable[[], float] = time.monotonic, burst_s: float = 1.0) -> None:
        self.unit_s = 1 / per_s
        self._burst_s = burst_s
        self._now = now
        self._free_at = float("-inf")

    def came(self, count: int) -> None:
        self._free_at = max(self._free_at, self._now() - self._burst_s) + count * self.unit_s

    def wait_s(self) -> float:
        """Seconds until more may be taken."""
        return max(0.0, self._free_at - self._now())


class Seldom:
    """One line of the log in a second: whoever knocks again and again must not fill the disk with it."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._next_s, self._num_left_out = float("-inf"), 0

    def left_out(self) -> int | None:
        """Since the last line; None where this is not the time for one."""
        if (now := self._now()) < self._next_s:
            self._num_left_out += 1
            return None
        left_out, self._num_left_out, self._next_s = self._num_left_out, 0, now + _LOG_INTERVAL_S
        return left_out


class Joins:
    """`per_s` joins in a second, that many at once. More wait their turn, at most `limit` of them.

    Whoever gives up while it waits has had its turn.
    """

    def __init__(self, per_s: float, limit: int, now: Callable[[], float] = time.monotonic) -> None:
        self._pace = Pace(per_s, now, burst_s=max(0.0, 1.0 - 1 / per_s))
        self._limit = limit

    def turn(self) -> float:
        """Take a place in the queue; the seconds until its turn. Raises a NOT_READY refusal when it is full."""
        wait_s, unit_s = self._pace.wait_s(), self._pace.unit_s
        if wait_s / unit_s > self._limit + 1e-3:
            what = f"{self._limit} workers wait to join, at {1 / unit_s:g} joins in a second (limits.joins_per_s)"
            raise refusal(Reason.NOT_READY, what, fix="try again in a moment")
        self._pace.came(1)
        return wait_s


class Allowance:
    """How long a sender may keep the server waiting: `limit_s` at first, and as much at most.

    Waiting uses it up, bytes give it back: `bytes_per_limit` of them all of it. So a pause may last `limit_s`, and
    a sender that is slower than `bytes_per_limit / limit_s` on average comes to its end, however small its pieces.
    """

    def __init__(self, limit_s: float, bytes_per_limit: int) -> None:
        self.limit_s = self.left_s = limit_s
        self._s_per_byte = limit_s / bytes_per_limit

    def came(self, num_bytes: int, waited_s: float) -> None:
        self.left_s = min(self.limit_s, self.left_s - waited_s + num_bytes * self._s_per_byte)

    def renew(self) -> None:
        self.left_s = self.limit_s


class FirstMessages:
    """The first messages of calls, which say whose call it is: each within `limit_s`, and of at most `limit` calls at
    once. Whoever has something to say says it at once, so the oldest call ends where a newer one is too many."""

    def __init__(self, name: str, limit_s: float, limit: int) -> None:
        self._name = name
        self._limit_s, self._limit = limit_s, limit
        self._deadlines: list[asyncio.Timeout] = []  # of silent calls, the oldest first

    async def of(self, messages: AsyncIterator[Message]) -> Message | None:
        """None when the call ended without one. Refuses BAD_REQUEST a call that says nothing."""
        deadline = asyncio.timeout(self._limit_s)
        try:
            async with deadline:
                self._deadlines.append(deadline)
                if len(self._deadlines) > self._limit and not (oldest := self._deadlines.pop(0)).expired():
                    oldest.reschedule(asyncio.get_running_loop().time())
                return await anext(messages, None)
        except TimeoutError:
            what = f"within {self._limit_s:g} s (server.join_timeout_s)"
            what = what if deadline in self._deadlines else f"before {self._limit} newer calls"
            raise refusal(Reason.BAD_REQUEST, f"no {self._name} {what}") from None
        finally:
            if deadline in self._deadlines:
                self._deadlines.remove(deadline)


class Watched(Protocol):
    """A stream as `Watch` sees it. Times are the event loop's, in seconds."""

    def look(self, now: float) -> None:
        """End the stream if its peer has kept the server waiting for too long."""

    def stood_still(self, seconds: float) -> None:
        """Whatever the stream has been waiting for, these seconds do not count."""


class Watch:
    """Looks at all open streams every LOOK_S while there are any."""

    def __init__(self) -> None:
        self._streams: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._standstill = Standstill(LOOK_S)

    def add(self, stream: Watched) -> None:
        self._streams.add(stream)
        if self._timer is None:
            self._standstill.look(asyncio.get_running_loop().time())
            self._look_later()

    def remove(self, stream: Watched) -> None:
        self._streams.discard(stream)

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        pause_s = self._standstill.look(now)
        for stream in list(self._streams):
            if pause_s:
                stream.stood_still(pause_s)
            stream.look(now)
        if self._streams:
            self._look_later()
