"""Decides when a snapshot is taken, and knows the durable version: on the disks of all shards."""

from __future__ import annotations

from typing import Any

DEFAULT_EVERY_S = 30.0


class Rhythm:
    """Allows one snapshot attempt at a time. `durable_version` is on all shards; 0 before the first."""

    def __init__(self, is_kept: bool, every_steps: int | None, every_s: float | None) -> None:
        self.is_kept = is_kept
        self.is_local = True  # False: another run keeps this one (`leave_to_another_run`)
        # What a user can do if the newest weights are lost.
        self.to_continue = "keep snapshots (--checkpoint-dir) to continue from; set --steps to the length of the loops"
        self.is_writing = False
        self.is_asked = False  # a user wants one with the next commit
        self.durable_version = 0
        self.needs_final = False  # another run makes the final weights, and has not sent them yet
        self._every_steps = every_steps
        self._every_s = every_s or (None if every_steps else DEFAULT_EVERY_S)
        self._attempt = 0
        self._attempted_version = 0  # of the newest attempt
        self._last_steps = 0  # training steps of the slowest rank then
        self._last_at: float | None = None
        self.has_committed = False  # since the newest attempt

    def leave_to_another_run(self, to_continue: str) -> None:
        """Another run has the snapshots, without the state of the optimizer. It also makes the final weights.

        A snapshot is an exchange with that run, at the beginning and at the end."""
        self.is_kept = self.needs_final = True
        self.is_local, self.to_continue = False, to_continue
        self._every_steps = self._every_s = None

    @property
    def keeps_optimizer(self) -> bool:
        """Whether snapshots need the optimizer's state."""
        return self.is_kept and self.is_local

    def restore(self, version: int, min_training_steps: int) -> None:
        """Continue from a snapshot of this version."""
        self.durable_version = self._attempted_version = version
        self._last_steps = min_training_steps

    def is_due(self, min_training_steps: int, at: float) -> bool:
        """Whether a snapshot of the newest version is due."""
        if not self.is_kept or self.is_writing or not self.has_committed:
            return False
        if self.is_asked:
            return True
        if self._last_at is None:  # the time since the start of this process counts from its first commit
            self._last_at = at
        if self._every_steps is not None:
            self._last_steps = min(self._last_steps, min_training_steps)  # a rank that comes back may be far behind
            if min_training_steps - self._last_steps >= self._every_steps:
                return True
        return self._every_s is not None and at - self._last_at >= self._every_s

    def begin(self, version: int, min_training_steps: int, at: float) -> int:
        """Begin an attempt; returns its number."""
        self._attempt += 1
        self._attempted_version, self._last_steps, self._last_at = version, min_training_steps, at
        self.is_writing, self.has_committed, self.is_asked = True, False, False
        return self._attempt

    def ended(self, attempt: int, durable: int) -> bool:
        """End an attempt; the newest version on all disks is `durable`. False for an outdated attempt."""
        if attempt != self._attempt or not self.is_writing:
            return False
        self.is_writing = False
        self.durable_version = max(self.durable_version, durable)
        return True

    def wants_last(self, version: int) -> bool:
        """Whether the run's end needs a snapshot: the newest version is not durable, and no attempt at it failed."""
        return self.is_kept and (self.is_writing or self.needs_final or self._attempted_version < version)

    def state(self) -> list[Any]:
        """Returns the whole state, to be compared between shards."""
        return [self.is_writing, self.durable_version, self._attempt, self._attempted_version, self._last_steps]
