"""Limits a worker's bandwidth (`worker.max_mbit`)."""

from __future__ import annotations

import threading
import time

# Traffic that may pass at once after a pause, so that a small message is not delayed.
_BURST_S = 0.05
_AT_ONCE_BYTES = 64 << 10


class Limit:
    """A limit in Mbit/s per direction, shared by all connections and threads of a worker. None: no limit.

    A thread waits after its bytes have passed, so a message is never interrupted.
    """

    def __init__(self, mbit: float | None = None) -> None:
        self._seconds_per_byte = 8e-6 / mbit if mbit else 0.0
        self._lock = threading.Lock()
        self._free_at = {"up": 0.0, "down": 0.0}  # when the bytes so far have passed
        self.at_once = _AT_ONCE_BYTES if mbit else 0  # bytes to write or read in one call; 0: any number

    def sent(self, num_bytes: int) -> None:
        """Count sent bytes. Returns when more may be sent."""
        self._passed("up", num_bytes)

    def received(self, num_bytes: int) -> None:
        """Count received bytes. Returns when more may be read; meanwhile the sender sees a full window."""
        self._passed("down", num_bytes)

    def _passed(self, way: str, num_bytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            free_at = max(self._free_at[way], now - _BURST_S) + num_bytes * self._seconds_per_byte
            self._free_at[way] = free_at
        if free_at > now:
            time.sleep(free_at - now)


NO_LIMIT = Limit()
