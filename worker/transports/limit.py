"""Limits a worker's bandwidth (`worker.max_mbit`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

# Traffic that may pass at once after a pause, so that a small message is not delayed.
_BURST_S = 0.05
_AT_ONCE_BYTES = 64 << 10


class Limit:
    """A limit in Mbit/s per direction, shared by all connections and threads of a worker. None: no limit.

    A thread waits after its bytes have passed, so a message is never interrupted.
    """

    def __init__(
        self,
        mbit: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._seconds_per_byte = 8e-6 / mbit if mbit else 0.0
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free_at = {"up": 0.0, "down": 0.0}  # when the bytes so far have passed
        self.at_once = _AT_ONCE_BYTES if mbit else 0  # bytes to write or read in one call; 0: any number

    def passed(self, way: Literal["up", "down"], num_bytes: int) -> None:
        """Count sent or received bytes. Returns when more may pass; meanwhile a sender sees a full window."""
        with self._lock:
            now = self._clock()
            free_at = max(self._free_at[way], now - _BURST_S) + num_bytes * self._seconds_per_byte
            self._free_at[way] = free_at
        if free_at > now:
            self._sleep(free_at - now)


NO_LIMIT = Limit()
