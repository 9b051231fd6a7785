"""Measures the time in which this process itself did not run: it was suspended or had no CPU.

A process that checks regularly whether others are silent receives nothing while it does not run. That time is not
silence of the others, so it does not count towards their lease. Silence while this process ran does count. So even a
process that is often suspended notices a dead peer after one lease of running time.
"""

from __future__ import annotations

_LEAST_S = 1.0


class Standstill:
    """Measures the pauses of a process that calls `look` every `look_s` seconds."""

    def __init__(self, look_s: float) -> None:
        self.look_s = look_s
        self._looked_at: float | None = None

    def look(self, now: float) -> float:
        """Return the seconds since the last look in which this process did not run; 0.0 if it ran normally."""
        gap_s = now - self._looked_at if self._looked_at is not None else 0.0
        self._looked_at = now
        return gap_s - self.look_s if gap_s > max(_LEAST_S, 2 * self.look_s) else 0.0
