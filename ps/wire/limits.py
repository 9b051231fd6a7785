"""Limits what one peer can cost the server: joins, bytes of uploads, and the time that others wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from ...common.errors import Reason, refusal

Message = TypeVar("Message")

_LOG_INTERVAL_S = 1.0


class RateLimiter:
    """A token-bucket rate limit: `per_s` units per second, with bursts of the units of `burst_s` seconds."""

    def __init__(self, per_s: float, now: Callable[[], float] = time.monotonic, burst_s: float = 1.0) -> None:
        self._s_per_unit, self._burst_s, self._now = 1 / per_s, burst_s, now
        self._free_at = float("-inf")

    def consume(self, count: int) -> None:
        """Use `count` units, without waiting."""
        self._free_at = max(self._free_at, self._now() - self._burst_s) + count * self._s_per_unit

    def wait_s(self) -> float:
        """Return the seconds until the caller may use more units."""
        return max(0.0, self._free_at - self._now())


class LogThrottle:
    """Limits log lines to one per second, so that a peer that calls repeatedly cannot fill the disk."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._next_s, self._num_suppressed = now, float("-inf"), 0

    def log(self, write: Callable[..., object], event: str, **fields: object) -> None:
        """Write a line with `left_out`, the number of lines suppressed since the last one, or suppress it too."""
        if (now := self._now()) < self._next_s:
            self._num_suppressed += 1
            return
        write(event, **fields, left_out=self._num_suppressed)
        self._num_suppressed, self._next_s = 0, now + _LOG_INTERVAL_S


class JoinQueue(RateLimiter):
    """Admits `per_s` joins per second, and as many at once. At most `limit` further joins wait in a queue.

    A worker that leaves the queue still uses its turn.
    """

    def __init__(self, per_s: float, limit: int, now: Callable[[], float] = time.monotonic) -> None:
        # A burst has `per_s` joins, because the delay is read before a join is counted.
        super().__init__(per_s, now, burst_s=max(0.0, 1.0 - 1 / per_s))
        self._limit = limit

    def reserve(self) -> float:
        """Enter the queue, and return the seconds until the turn. Raises a NOT_READY refusal if the queue is full."""
        wait_s = self.wait_s()
        if wait_s / self._s_per_unit > self._limit + 1e-3:  # the clock is rounded
            rate = f"{1 / self._s_per_unit:g} joins in a second (limits.joins_per_s)"
            problem = f"{self._limit} workers wait to join, at {rate}"
            raise refusal(Reason.NOT_READY, problem, fix="try again in a moment")
        self.consume(1)
        return wait_s


class TimeBudget:
    """The time for which a sender may keep the server waiting, at most `limit_s` seconds.

    Waiting reduces the allowance, and received bytes restore it: `bytes_per_limit` bytes restore all of it. So one
    pause may last `limit_s`. A sender whose average is below `bytes_per_limit / limit_s` uses the allowance up, even if
    it sends small pieces often.
    """

    def __init__(self, limit_s: float, bytes_per_limit: int) -> None:
        self.limit_s = self.left_s = limit_s
        self._s_per_byte = limit_s / bytes_per_limit

    def add_bytes(self, num_bytes: int, waited_s: float) -> None:
        """Count `num_bytes` that arrived after `waited_s` seconds."""
        self.left_s = min(self.limit_s, self.left_s - waited_s + num_bytes * self._s_per_byte)

    def reset(self) -> None:
        """Restore the whole allowance."""
        self.left_s = self.limit_s


class FirstMessages:
    """Waits for the first message of each call, which names the caller.

    A call must send it within `limit_s`. At most `limit` calls may be silent at once. Beyond that, the oldest silent
    call ends, since a correct caller sends its first message at once.
    """

    def __init__(self, name: str, limit_s: float, limit: int) -> None:
        self._name, self._limit_s, self._limit = name, limit_s, limit
        self._deadlines: list[asyncio.Timeout] = []  # of silent calls, oldest first

    async def first_of(self, messages: AsyncIterator[Message]) -> Message | None:
        """Return the first message, or None if the call ended. Raises a BAD_REQUEST refusal if it is late."""
        deadline = asyncio.timeout(self._limit_s)
        try:
            async with deadline:
                self._deadlines.append(deadline)
                if len(self._deadlines) > self._limit and not (oldest := self._deadlines.pop(0)).expired():
                    oldest.reschedule(asyncio.get_running_loop().time())
                return await anext(messages, None)
        except TimeoutError:
            limit = f"within {self._limit_s:g} s (server.join_timeout_s)"
            when = limit if deadline in self._deadlines else f"before {self._limit} newer calls"
            raise refusal(Reason.BAD_REQUEST, f"no {self._name} {when}") from None
        finally:
            if deadline in self._deadlines:
                self._deadlines.remove(deadline)
