"""Who has not been heard of for too long. Pure; `now` is the server's monotonic clock, in seconds.

A worker's signs of life are its heartbeats and its contributions. The time in which this process was
frozen itself does not count: nobody could be heard then.
"""

from __future__ import annotations

# Leases are looked at five times a second; a longer pause than this means that this process stood still.
_STANDSTILL_S = 1.0


class Leases:
    """Deadlines of ranks. Only who has said a first word has one."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._heard: dict[int, float] = {}
        self._looked_at: float | None = None

    def renew(self, rank: int, now: float) -> None:
        """A sign of life."""
        self._heard[rank] = now

    def has(self, rank: int) -> bool:
        """Whether the rank has said a first word."""
        return rank in self._heard

    def forget(self, rank: int) -> None:
        """The rank has left."""
        self._heard.pop(rank, None)

    def look(self, now: float) -> list[int]:
        """Ranks whose lease has ended; call it every fraction of a second."""
        if self._looked_at is not None and now - self._looked_at > _STANDSTILL_S:
            for rank in self._heard:
                self._heard[rank] = now
        self._looked_at = now
        return sorted(rank for rank, heard in self._heard.items() if now - heard > self.lease_s)

    def silent_s(self, rank: int, now: float) -> float:
        """Seconds since the rank's last sign of life."""
        return now - self._heard.get(rank, now)
