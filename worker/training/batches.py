"""`Batches`, which `session.shard()` returns: this rank's batches until its loop or the run is over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import Any, Protocol, runtime_checkable

import torch

from ...common.errors import UsageError
from ..session import Progress
from .data import Loader, Shares, epoch_batches, seed_everything, sharded_batches, step_seed
from .position.data import DataPosition, FetchedBatches
from .position.stream import check_stream

_NUM_DIGESTED = 64  # elements of each tensor that the digest covers
_SUMMED = 1 << 20  # elements of a tensor that are summed at once


@runtime_checkable
class _InParts(Protocol):
    """A tensor whose other rows are in other processes (DTensor)."""

    def to_local(self) -> torch.Tensor: ...


class Batches:
    """An iterator over this rank's batches, with a length.

    A batch counts towards a step only when the step is taken, because trainers may fetch batches ahead. In a loop over
    `session.epochs()` the iterator ends with the epoch. The script may iterate again in the next epoch.
    """

    def __init__(
        self,
        shares: Shares,
        data: DataPosition,
        progress: Callable[[], Progress],
        is_over: Callable[[], bool],
        options: dict[str, Any],
        epochs: int | None = None,
        inner: tuple[int, int] = (0, 1),
    ) -> None:
        """`shares` has the batch size of one process.

        `inner`: this process's group rank and the size of the replica group.
        """
        self._group_rank, self._group_size = inner
        self._shares, self._data, self._progress = shares, data, progress
        self._is_over, self._options, self._epochs = is_over, options, epochs
        self.fetched = FetchedBatches()
        self._made_for: tuple[int, int | None] | None = None  # (moves, epoch) that `_batches` was made for
        self._batches: Iterator[tuple[Any, int]] = iter(())
        self._loader = Loader(shares.dataset, options)
        self._check()
        data.batches_per_epoch = self._epoch_length  # raises UsageError early if the data cannot be divided
        self._end = self._end_of_loop()
        data.add(self)
        data.num_samples = shares.num_samples

    def _check(self) -> None:
        """Raises UsageError for options that a data set without a length does not support."""
        if self._shares.is_stream:
            has_steps = self._progress().total_steps is not None or self._data.length.default is not None
            options = {"pads": self._shares.pads, "sampler": self._shares.sampler, **self._options}
            check_stream(self._shares.dataset, has_steps and self._data.epoch is None and not self._epochs, options)

    def __iter__(self) -> Batches:
        if self._end is not None and self._at >= self._end:
            self._end = self._end_of_loop()
        return self

    def __len__(self) -> int:
        """Batches that this rank still gets in the loop.

        If a step takes several, it assumes as many as in the newest step.
        """
        if self._data.epoch is not None:
            return max(0, self._epoch_length - self._data.num_drawn - len(self.fetched))
        limits = [] if self._end is None else [self._end - self._at]
        if (num_in_run := self._num_in_run) is not None:
            limits.append(num_in_run)
        if not limits:  # only run.epochs is set, and no step was taken yet
            limits.append((self._data.length.epochs or 0) * self._data.batches_per_epoch - self._at)
        return max(0, min(limits))

    @property
    def _num_in_run(self) -> int | None:
        """Batches that this rank still needs for the run's remaining steps; None: the run has no number of steps."""
        steps = self._num_left
        if steps is None:
            return None
        return steps * max(1, self._data.batches_per_step) - self._data.num_ended - len(self.fetched)

    @property
    def _num_left(self) -> int | None:
        """Training steps that are left in the run; None: the run has no number of steps, or not yet."""
        progress = self._progress()
        return None if progress.total_steps is None else max(0, progress.total_steps - progress.position)

    @property
    def _at(self) -> int:
        """The rank's position, including batches that were fetched and not yet used."""
        return self._data.position + self._data.num_ended + len(self.fetched)

    @property
    def _has_ended(self) -> bool:
        return self._data.epoch is None and self._end is not None and self._at >= self._end

    def _end_of_loop(self) -> int | None:
        """The position at which the loop ends; None: the loop ends with the run."""
        each, progress = self._data.batches_per_epoch, self._progress()
        if progress.total_steps is not None or not self._data.length.is_open:
            return None
        return each * (self._at // each + 1 if self._epochs is None else self._epochs)

    @property
    def _epoch_length(self) -> int:
        return self._shares.num_batches(self._division[0])

    def __next__(self) -> Any:
        if not torch.is_grad_enabled():
            raise UsageError(
                "a batch of session.shard() was requested under torch.no_grad(): it counts towards this rank's "
                "position in the training data, and training would miss it",
                fix="use a DataLoader for validation data; request training batches outside of no_grad()",
            )
        data, memory = self._data, self._data.memory
        if memory is not None and data.has_used_replay(self.fetched):
            self.fetched.drop()
            memory.replayed()
        if self._has_all or data.has_fetched_last_replay(self.fetched):
            self._note()  # the fetched batches still need a step
            raise StopIteration
        if self._has_ended:
            data.end_loop(self)
            raise StopIteration
        if self._is_over():
            raise StopIteration
        if memory is not None and memory.has_moved:
            if data.epoch is not None:
                raise StopIteration  # ends the inner loop, so that the loop over epochs can go back
            memory.move()
        if self._made_for != (data.num_jumps, data.epoch):  # at the start, and after the run moved without this worker
            self._begin()
        if data.epoch is not None and not len(self):
            if self.fetched.is_ahead:
                self._note()  # the fetched batches still need a step
            self.end_epoch()
            raise StopIteration
        self._note()
        rank = (self._progress().rank or 0) * self._group_size + self._group_rank
        seed_everything(step_seed(self._shares.seed, rank, self._at))
        batch, num_samples = next(self._batches)
        self.fetched.batch_samples.append(num_samples)
        return batch

    def _note(self) -> None:
        if self._data.memory is not None:
            self._data.memory.note()

    def _begin(self) -> None:
        """Make the iterator of batches from this rank's position on."""
        data = self._data
        self._check()
        if self._made_for is None or self._made_for[0] != data.num_jumps:
            self.fetched.drop()
        self._made_for = data.num_jumps, data.epoch
        if data.epoch is None:
            self._batches = sharded_batches(self._shares, lambda: self._division, self._at, **self._options)
            return
        data.current_epoch_batches = max(data.current_epoch_batches, self._epoch_length)
        self._batches = epoch_batches(self._shares, data.epoch, self._division, data.num_drawn, self._loader)

    def end_epoch(self) -> None:
        """The epoch ends: hand over the batches that no step has taken yet."""
        self._data.keep_unused(self.fetched)
        self.fetched = FetchedBatches(self.fetched.is_ahead)

    @property
    def num_samples(self) -> int:
        """Weight of the newest batch in a mean: its number of samples."""
        return self.fetched.batch_samples[-1]

    def zero_sample_weights(self) -> None:
        """Give the batches since the last step the weight 0, because their gradient was discarded."""
        self.fetched.batch_samples = deque([0] * len(self.fetched))

    @property
    def _division(self) -> tuple[int, int]:
        progress = self._progress()
        num_workers = max(1, progress.num_workers)
        # All processes together get the union batch: each takes every n-th sample.
        return num_workers * self._group_size, progress.worker_index + num_workers * self._group_rank

    @property
    def _has_all(self) -> bool:
        """Whether a prefetching loop has fetched the batches of all remaining steps.

        Then `__next__` must end at once: `is_over()` would wait for the end of the run, which needs these steps first.
        """
        return bool(
            self.fetched.is_ahead and self._data.batches_per_step and self._num_left and (self._num_in_run or 0) <= 0
        )


def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """A 64-bit digest of dense tensors, from their first elements and sums; 0 when all of these are zero."""
    tensors = [tensor.to_local() if isinstance(tensor, _InParts) else tensor for tensor in tensors]
    dense = [tensor.detach().flatten() for tensor in tensors if not tensor.is_sparse]
    begins = [tensor[:_NUM_DIGESTED].double() for tensor in dense]
    # The sums cover rows beyond the first ones, which many batches do not touch. Each chunk is summed alone, because
    # torch on the CPU converts a whole tensor to float64 before it sums.
    parts = [torch.stack([part.sum(dtype=torch.float64) for part in tensor.split(_SUMMED)]) for tensor in dense]
    sums = [part.sum().reshape(1) for part in parts]
    seen = torch.cat([*begins, *sums]).cpu() if dense else torch.zeros(1)
    if not seen.any():
        return 0
    return int.from_bytes(blake2b(seen.numpy().tobytes(), digest_size=8).digest(), "little")


def read_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options for the DataLoader. Raises UsageError for options that `session.shard()` does not support."""
    if options.get("batch_sampler") is not None:
        raise UsageError(
            "session.shard() divides the data itself and cannot use a batch_sampler",
            fix="give session.shard() batch_size=, drop_last= and sampler=",
        )
    return {name: value for name, value in options.items() if name != "batch_sampler"}
