"""Counts the batches that each rank has drawn: a step that accumulates gradients draws several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ....common.errors import same_batches
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
    """Data sets as workers describe them with their first contribution, and a warning for each mistake, once."""

    def __init__(self) -> None:
        self._firsts: dict[tuple[int, int], int] = {}  # rank, by the version it began with and digest
        self._began: dict[int, tuple[int, int]] = {}  # version and digest of each rank's newest first contribution
        self.twins: dict[int, int] = {}  # by rank, until it is notified: another with the same first result
        self._lengths: dict[int, int] = {}  # by rank, of its data set
        self._num_of: Counter[int] = Counter()  # ranks, by that length
        self._is_said: set[str] = set()

    @property
    def num_samples(self) -> int | None:
        """Samples of the common data set; None where no worker reported a length, or the lengths differ."""
        return next(iter(self._num_of)) if len(self._num_of) == 1 else None

    def record(self, rank: int, version: int, num_samples: int, digest: int) -> Iterator[Effect]:
        """Record a worker's first contribution: samples of its data set, and the digest of its result (0: unknown)."""
        if (other := self._twin(rank, version, digest)) is not None:
            self.twins |= {rank: other, other: rank}
            yield from self._warn("same_batches", **same_batches(other, rank))
        if not num_samples:
            return
        if rank in self._lengths:
            self._num_of -= Counter({self._lengths[rank]: 1})
        self._lengths[rank] = num_samples
        self._num_of[num_samples] += 1
        if len(self._num_of) > 1 and "data_differs" not in self._is_said:
            found = ", ".join(f"rank {rank} {num:,}" for rank, num in sorted(self._lengths.items()))
            yield from self._warn(
                "data_differs",
                lengths=dict(self._lengths),
                meaning=f"the data sets that session.shard() divides have different lengths ({found} samples): some "
                "samples belong to no rank, or to two",
                fix="give every worker the whole data set; if each worker has its own data, use a DataLoader instead "
                "of session.shard()",
            )

    def _twin(self, rank: int, version: int, digest: int) -> int | None:
        """Returns another rank whose first result, from the same weights, is the same."""
        before, newest = self._began.get(rank), (version, digest)
        if before is not None and self._firsts.get(before) == rank:
            del self._firsts[before]
        self._began[rank] = newest
        other = self._firsts.setdefault(newest, rank) if digest else rank
        return other if other != rank else None

    def _warn(self, name: str, **fields: Any) -> Iterator[Effect]:
        if name not in self._is_said:
            self._is_said.add(name)
            yield Log("warning", name, fields)
