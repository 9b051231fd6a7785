"""How long this process stood still itself: suspended, or starved of the CPU.

A process that looks regularly whether others are silent hears nobody while it stands still. That time is not silence
of the others. The silence before it still counts, so that a process that stands still again and again misses a dead
peer after one lease of time in which it ran.
"""

from __future__ import annotations

_LEAST_S = 1.0


class Standstill:
    """Measures the pauses of a process that looks every `look_s` seconds."""

    def __init__(self, look_s: float) -> None:
        self.look_s = look_s
        self._looked_at: float | None = None

    def look(self, now: float) -> float:
        """Return the seconds since the last look that nobody is to be blamed for; 0.0 where this process runs."""
        gap_s = now - self._looked_at if self._looked_at is not None else 0.0
        self._looked_at = now
        return gap_s - self.look_s if gap_s > max(_LEAST_S, 2 * self.look_s) else 0.0
