"""Decides when a region exchanges with the run above. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_AHEAD = 4  # default of `ahead`, in contributions


@dataclass
class Pace:
    """Counts a region's training steps, those of its slowest worker.

    `every`: steps of one contribution to the run above. `waits`: the region waits for each reply. Otherwise it trains
    on, at most `ahead` steps beyond the oldest contribution without a reply. None means 4 times `every`. While one
    contribution is in flight, later ones are queued.
    """

    every: int
    waits: bool
    ahead: int | None = None
    steps: int = 0  # at the newest contribution, sent or queued
    unanswered: deque[int] = field(default_factory=deque)  # steps at each contribution without a reply; one is sent

    def is_due(self, steps: int) -> bool:
        """Whether to contribute the version after so many steps."""
        return steps - self.steps >= self.every

    def must_wait(self, steps: int) -> bool:
        """Whether the region waits, after so many steps, for the oldest reply."""
        most = self.every * _AHEAD if self.ahead is None else self.ahead
        return bool(self.unanswered) and (self.waits or steps - self.unanswered[0] >= most)

    def contribute(self, steps: int) -> None:
        """Note that the version after so many steps is contributed."""
        self.steps = steps
        self.unanswered.append(steps)

    @property
    def has_queue(self) -> bool:
        """Whether the newest contribution waits for the reply to an earlier one."""
        return len(self.unanswered) > 1

    def replied(self, every: int) -> bool:
        """Note the reply to the oldest contribution. Later ones have `every` steps. Returns whether one is queued."""
        self.unanswered.popleft()
        self.every = max(1, every)
        return bool(self.unanswered)
