"""Counts the batches that each rank has drawn: a step that accumulates gradients draws several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ....common.errors import ParamServerError, Reason, refusal, same_batches
from ..effects import Effect, Log


class Drawn:
    """Batches behind each rank, counting only contributions that a version has."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, int]] = {}  # by rank: batches, and the training steps they were for
        self._per_step: Counter[int] = Counter()  # how many ranks draw so many batches for a training step

    def committed(self, rank: int, num_batches: int, num_steps: int, steps_done: int) -> None:
        """Count contributions of `num_steps` training steps as committed; the rank then has `steps_done` steps."""
        self._set(rank, self.num_batches(rank, steps_done - num_steps) + num_batches, steps_done)

    def _set(self, rank: int, batches: int, steps: int) -> None:
        old_batches, old_steps = self._counts.get(rank, (0, 0))
        old, new = old_batches // old_steps if old_steps else 0, batches // steps if steps else 0
        if old != new:
            self._per_step[old] -= 1
            self._per_step += Counter({new: 1})  # adding also drops zero counts
        self._counts[rank] = (batches, steps)

    def num_batches(self, rank: int, steps_done: int) -> int:
        """Batches behind a rank with so many training steps. Steps that counted without the rank (it was away, or the
        snapshot has no number) are assumed to have drawn as many as the steps of others."""
        batches, steps = self._counts.get(rank, (0, 0))
        if steps_done <= steps:
            return batches
        return batches + (steps_done - steps) * max(1, max(self._per_step, default=1))

    def saved(self) -> dict[str, list[int]]:
        return {str(rank): list(counts) for rank, counts in self._counts.items()}

    def restore(self, saved: Any) -> None:
        """Restore what `saved` returned; an absent or malformed rank counts one batch for each training step."""
        for rank, counts in saved.items() if isinstance(saved, dict) else ():
            match counts:
                case [int(batches), int(steps)] if rank.isdecimal():
                    self._set(int(rank), batches, steps)


class Data:
    """The data of a run as workers describe it with their first contributions."""

    def __init__(self) -> None:
        self._firsts: dict[tuple[int, int], int] = {}  # rank, by the version it began with and digest
        self._began: dict[int, tuple[int, int]] = {}  # version and digest of each rank's newest first contribution
        self.twins: dict[int, int] = {}  # by rank, until it is notified: another with the same first result
        self.num_samples: int | None = None  # of the data set, also before a snapshot; None: no worker has said it
        self._is_said = False

    def record(self, rank: int, version: int, digest: int) -> Iterator[Effect]:
        """Record a digest of the result of a worker's first contribution; 0: unknown. Warns once of equal ones."""
        if (other := self._twin(rank, version, digest)) is not None:
            self.twins |= {rank: other, other: rank}
            if not self._is_said:
                self._is_said = True
                yield Log("warning", "same_batches", same_batches(other, rank))

    def differs(self, rank: int, num_samples: int) -> ParamServerError | None:
        """Returns the refusal of a rank whose data set has another length than the run's. 0 samples: unknown."""
        if not num_samples or self.num_samples in (None, num_samples):
            self.num_samples = num_samples or self.num_samples
            return None
        return refusal(
            Reason.RUN_MISMATCH,
            f"the data set that rank {rank} gives to session.shard() has {num_samples:,} samples, and the run's has "
            f"{self.num_samples:,}: the ranks' positions in it would not fit",
            fix="give every worker the whole data set, the same as before a resume; or a DataLoader of its own instead "
            "of session.shard(); worker.accept_other_data=true (PS_WORKER__ACCEPT_OTHER_DATA=1) goes on with it",
        )

    def _twin(self, rank: int, version: int, digest: int) -> int | None:
        """Returns another rank whose first result, from the same weights, is the same."""
        before, newest = self._began.get(rank), (version, digest)
        if before is not None and self._firsts.get(before) == rank:
            del self._firsts[before]
        self._began[rank] = newest
        other = self._firsts.setdefault(newest, rank) if digest else rank
        return other if other != rank else None
