"""Limits on what one peer costs the server: joins, bytes of uploads, and the time that others wait for it.

Messages pass without a timer: a stream notes since when it has been waiting, and `Watch` looks at all streams five
times a second.
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
    """A token bucket: `per_s` units in a second, the units of `burst_s` at once."""

    def __init__(self, per_s: float, now: Callable[[], float] = time.monotonic, burst_s: float = 1.0) -> None:
        self.unit_s = 1 / per_s
        self._burst_s = burst_s
        self._now = now
        self._free_at = float("-inf")

    def take(self, count: int) -> None:
        self._free_at = max(self._free_at, self._now() - self._burst_s) + count * self.unit_s

    def wait_s(self) -> float:
        """Seconds until more may be taken."""
        return max(0.0, self._free_at - self._now())


class Seldom:
    """One line of the log in a second: a peer that calls again and again must not fill the disk."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._next_s, self._num_left_out = float("-inf"), 0

    def left_out(self) -> int | None:
        """The lines left out since the last one; None where this line is left out too."""
        if (now := self._now()) < self._next_s:
            self._num_left_out += 1
            return None
        left_out, self._num_left_out, self._next_s = self._num_left_out, 0, now + _LOG_INTERVAL_S
        return left_out


class Joins:
    """`per_s` joins in a second, that many at once. More wait their turn, at most `limit` of them.

    A worker that gives up while it waits has used its turn.
    """

    def __init__(self, per_s: float, limit: int, now: Callable[[], float] = time.monotonic) -> None:
        self._pace = Pace(per_s, now, burst_s=max(0.0, 1.0 - 1 / per_s))
        self._limit = limit

    def turn(self) -> float:
        """Join the queue; returns the seconds until the turn. Raises a NOT_READY refusal when the queue is full."""
        wait_s, unit_s = self._pace.wait_s(), self._pace.unit_s
        if wait_s / unit_s > self._limit + 1e-3:
            problem = f"{self._limit} workers wait to join, at {1 / unit_s:g} joins in a second (limits.joins_per_s)"
            raise refusal(Reason.NOT_READY, problem, fix="try again in a moment")
        self._pace.take(1)
        return wait_s


class Allowance:
    """How long a sender may keep the server waiting: at most `limit_s`.

    Waiting uses the allowance up, and bytes give it back, `bytes_per_limit` of them all of it. So a pause may last
    `limit_s`, and a sender that is slower than `bytes_per_limit / limit_s` on average is ended, however small its
    pieces.
    """

    def __init__(self, limit_s: float, bytes_per_limit: int) -> None:
        self.limit_s = self.left_s = limit_s
        self._s_per_byte = limit_s / bytes_per_limit

    def came(self, num_bytes: int, waited_s: float) -> None:
        self.left_s = min(self.limit_s, self.left_s - waited_s + num_bytes * self._s_per_byte)

    def renew(self) -> None:
        self.left_s = self.limit_s


class FirstMessages:
    """The first messages of calls, which name the caller: each within `limit_s`, and of at most `limit` calls at once.
    Beyond that the oldest silent call ends, since an honest caller sends its first message at once."""

    def __init__(self, name: str, limit_s: float, limit: int) -> None:
        self._name = name
        self._limit_s, self._limit = limit_s, limit
        self._deadlines: list[asyncio.Timeout] = []  # of silent calls, the oldest first

    async def of(self, messages: AsyncIterator[Message]) -> Message | None:
        """The first message; None when the call ended without one. Refuses BAD_REQUEST a silent call."""
        deadline = asyncio.timeout(self._limit_s)
        try:
            async with deadline:
                self._deadlines.append(deadline)
                if len(self._deadlines) > self._limit and not (oldest := self._deadlines.pop(0)).expired():
                    oldest.reschedule(asyncio.get_running_loop().time())
                return await anext(messages, None)
        except TimeoutError:
            is_late = deadline in self._deadlines
            when = (
                f"within {self._limit_s:g} s (server.join_timeout_s)"
                if is_late
                else f"before {self._limit} newer calls"
            )
            raise refusal(Reason.BAD_REQUEST, f"no {self._name} {when}") from None
        finally:
            if deadline in self._deadlines:
                self._deadlines.remove(deadline)


class Watched(Protocol):
    """A stream as `Watch` sees it. Times are the event loop's, in seconds."""

    def look(self, now: float) -> None:
        """End the stream if its peer has kept the server waiting for too long."""

    def stood_still(self, seconds: float) -> None:
        """These seconds do not count as waiting."""


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
