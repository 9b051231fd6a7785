"""`worker.max_mbit`: limits the bandwidth of a worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# Traffic that may pass at once after a pause, so that a small message does not wait.
_BURST_S = 0.05
_AT_ONCE_BYTES = 64 << 10


class Limit:
    """Mbit/s each way, over all connections of a worker, whose threads share it; None: no limit. A thread waits after
    its bytes have passed, so that a message is never interrupted."""

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
        self.at_once = _AT_ONCE_BYTES if mbit else 0  # bytes to write or read in one go; 0: any

    def sent(self, num_bytes: int) -> None:
        """Count sent bytes; returns when more may be sent."""
        self._passed("up", num_bytes)

    def received(self, num_bytes: int) -> None:
        """Count received bytes; returns when more may be read. Meanwhile the sender meets a full window."""
        self._passed("down", num_bytes)

    def _passed(self, way: str, num_bytes: int) -> None:
        if not self._seconds_per_byte:
            return
        with self._lock:
            now = self._clock()
            free_at = max(self._free_at[way], now - _BURST_S) + num_bytes * self._seconds_per_byte
            self._free_at[way] = free_at
        if free_at > now:
            self._sleep(free_at - now)


NO_LIMIT = Limit()
