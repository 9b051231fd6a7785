"""Where each rank is in its data: a training step that accumulates gradients draws several batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ....common.errors import same_batches
from ..effects import Effect, Log


class Drawn:
    """Batches that are behind each rank, of what is in a version."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, int]] = {}  # by rank: batches, and the training steps they were for
        self._per_step: Counter[int] = Counter()  # how many ranks draw so many batches for a training step

    def committed(self, rank: int, num_batches: int, num_steps: int, steps_done: int) -> None:
        """Contributions of the rank, of `num_steps` training steps, are in a version; with them so many count."""
        batches, steps = self._counts.get(rank, (0, 0))
        if steps == batches == steps_done - num_steps and num_batches == num_steps and steps:
            self._counts[rank] = steps_done, steps_done  # a batch for each step, as before
        else:
            self._set(rank, self.num_batches(rank, steps_done - num_steps) + num_batches, steps_done)

    def _set(self, rank: int, batches: int, steps: int) -> None:
        old_batches, old_steps = self._counts.get(rank, (0, 0))
        old, new = old_batches // old_steps if old_steps else 0, batches // steps if steps else 0
        if old != new:
            self._per_step[old] -= 1
            self._per_step += Counter({new: 1})  # and forget those that nobody draws
        self._counts[rank] = (batches, steps)

    def num_batches(self, rank: int, steps_done: int) -> int:
        """Batches behind a rank with so many training steps. Steps that counted without it (it was away, or the
        snapshot does not tell) are taken to have drawn as many as others'."""
        batches, steps = self._counts.get(rank, (0, 0))
        if steps_done <= steps:
            return batches
        return batches + (steps_done - steps) * max(1, max(self._per_step, default=1))

    def saved(self) -> dict[str, list[int]]:
        return {str(rank): list(counts) for rank, counts in self._counts.items()}

    def restore(self, saved: Any) -> None:
        """What is not there, or not what it should be, is counted in training steps."""
        for rank, counts in saved.items() if isinstance(saved, dict) else ():
            match counts:
                case [int(batches), int(steps)] if rank.isdecimal():
                    self._set(int(rank), batches, steps)


class Data:
    """What workers say of their data with their first contribution, and mistakes that it shows; each is said once."""

    def __init__(self) -> None:
        self._firsts: dict[tuple[int, int], int] = {}  # rank, by the version it began with and digest
        self._began: dict[int, tuple[int, int]] = {}  # the same by rank, of the newest
        self.twins: dict[int, int] = {}  # by rank, until it is told: another that began with the same result
        self._lengths: dict[int, int] = {}  # by rank, of its data set
        self._num_of: Counter[int] = Counter()  # ranks, by that length
        self._is_said: set[str] = set()

    @property
    def num_samples(self) -> int | None:
        """Of the data set that all have; None where nobody said it, or they differ."""
        return next(iter(self._num_of)) if len(self._num_of) == 1 else None

    def record(self, rank: int, version: int, num_samples: int, digest: int) -> Iterator[Effect]:
        """Both 0 where they are not known."""
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
                "samples are nobody's, or two ranks'",
                fix="give every worker the whole data set; where each has its own, a DataLoader instead of "
                "session.shard()",
            )

    def _twin(self, rank: int, version: int, digest: int) -> int | None:
        """Another rank that began with the same result from the same weights."""
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
