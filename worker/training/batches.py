"""`Batches`, which `session.shard()` returns: this rank's batches, in loops of one pass or several."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from hashlib import blake2b
from operator import index
from typing import Any, cast

import torch

from ...common.errors import UsageError
from ..tensors.transfer import is_divided
from .data import Loader, Shares, seed_everything, step_seed
from .position.data import Cursor
from .position.memory import Memory
from .position.sources import check_stream, is_stream

_NUM_DIGESTED = 64  # elements of each tensor that the digest covers
_SUMMED = 1 << 20  # elements of a tensor that are summed at once


class NoLengthError(UsageError, TypeError):
    """`len()` of the batches of a stream. Like other iterables without a length, it is a TypeError."""


class Batches:
    """This rank's batches. Each loop over them is `epochs` passes over the data, or goes on until the run ends."""

    def __init__(
        self,
        shares: Shares,
        memory: Memory,
        end: tuple[Callable[[], bool], Callable[[], bool]],
        options: dict[str, Any],
        accumulate: int,
        prefetch: int,
        epochs: int | None,
        inner: tuple[int, int] = (0, 1),
    ) -> None:
        """`shares` has the batch size of one process.

        `end`: whether the run has all its steps, and the same after a wait for all workers. `epochs`: passes of a loop;
        None: it goes on until the run ends. `inner`: this process's group rank and the size of the replica group.
        """
        self._group_rank, self._group_size = inner
        self._shares, self._memory, self._data = shares, memory, memory.data
        self._progress = self._data.progress
        self._is_done, self._is_over = end
        self._loader = Loader(shares, options)
        self._cursor: Cursor | None = None  # of the newest loop
        self._number = 0  # of the newest loop
        self._size = shares.num_samples
        self._accumulate, self._prefetch, self._epochs = accumulate, prefetch, epochs
        self.num_samples = 0  # weight of the newest batch in a mean: its number of samples
        self._check()
        self._pass_batches = self._num_in_pass()  # raises UsageError early if the data cannot be divided
        self._data.add(self)
        self._data.num_samples = self._data.num_samples or self._size
        self._data.batches_per_epoch = self._data.batches_per_epoch or self._pass_batches

    def _check(self) -> None:
        """Raises UsageError for options that do not go together."""
        has_end = self._progress.total_steps is not None or self._data.length.default is not None
        if is_stream(self._shares.dataset):
            options = {"pad": self._shares.pads, "sampler": self._shares.sampler, **self._loader.options}
            counts_epochs = self._data.epoch is not None or self._data.length.epochs is not None
            check_stream(self._shares.dataset, counts_epochs, options)
        ends_by_metrics = self._data.strategy.settings.ends_by_metrics  # the run may end without a number of steps
        if self._epochs is None and not (has_end or self._data.length.epochs or ends_by_metrics):
            message = "session.shard(epochs=None) goes on until the run ends, and the run has no length"
            raise UsageError(message, fix="--steps N or --epochs N; or session.shard(epochs=N)")

    @property
    def dataset(self) -> Any:
        """The whole data set, of all ranks, as a DataLoader has it."""
        return self._shares.dataset

    # ---- lengths ------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of this rank in one loop. It does not change while the loop runs, and is the same after a resume."""
        length = self._data.length
        if self._epochs is not None:
            num = self._epochs * self._pass_batches
        elif (steps := self._progress.total_steps or length.default) is not None:
            return steps * self.accumulate
        else:
            num = (length.epochs or 0) * self._pass_batches
        if not num:
            message = f"{type(self._shares.dataset).__name__} has no length, so a loop over it has none"
            raise NoLengthError(message, fix="count the batches; or --steps N and session.shard(..., epochs=None)")
        return num

    @property
    def remaining(self) -> int:
        """Batches that this loop still yields, for a progress bar. 0: the newest batch is the last one."""
        cursor = self._cursor
        limits = [] if (num := self._num_left) is None else [num]
        if cursor is None:
            limits.append(len(self))
        elif cursor.end is not None:
            limits.append(cursor.end - cursor.next)
        return max(0, min(limits, default=0))

    @property
    def _num_left(self) -> int | None:
        """Batches that this rank still needs for the run's remaining steps; None: the run has no number of steps."""
        progress, cursor = self._progress, self._cursor
        if progress.total_steps is None:
            return None
        in_hand = 0 if cursor is None else len(cursor.in_hand) - cursor.num_void
        return max(0, progress.total_steps - progress.position) * max(1, self.accumulate) - in_hand

    @property
    def accumulate(self) -> int:
        """Batches of a step. It may be set between steps."""
        return self._accumulate

    @accumulate.setter
    def accumulate(self, num: int) -> None:
        self._accumulate = check_count("shard(accumulate=", num)
        if self._cursor is not None:
            self._cursor.accumulate = num

    # ---- one loop -----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        self._number += 1
        _check_grad()
        number, cursor = self._number, self._open()
        if cursor.end is not None and cursor.next >= cursor.end:  # the loop lies behind the rank
            cursor.has_ended = self._data.has_read_all = True
            self._memory.passed_over = self._progress.is_replaying
            return
        batches: Iterator[tuple[Any, int, bool]] = iter(())
        made_for, num_read = -1, 0  # `num_moves` of the cursor when `batches` was made; batches read since
        while self._goes_on(number, cursor):
            if made_for != cursor.num_moves:
                batches, made_for, num_read = self._read(cursor), cursor.num_moves, 0
            begins = self._memory.note()
            rank = (self._progress.rank or 0) * self._group_size + self._group_rank
            seed_everything(step_seed(self._shares.seed, rank, cursor.next))
            if (found := next(batches, None)) is None:
                if cursor.num_fill and num_read:
                    made_for = -1  # a batch may be a filler twice
                    continue
                self._data.has_read_all = True
                if begins and not cursor.in_hand:
                    self._memory.take()  # the script may do work before the contribution begins
                break
            batch, self.num_samples, is_last = found
            num_read += 1
            cursor.yielded(self.num_samples, is_last)
            yield batch
        if number == self._number:
            cursor.has_ended = True
            if cursor.in_hand:
                self._memory.note()  # the batches in hand still need a step

    def _open(self) -> Cursor:
        """Begin a loop at this rank's position."""
        self._check()
        epochs, of_run = self._epochs, self._data.length.epochs
        cursor, first = self._data.open(self, epochs)
        cursor.accumulate, cursor.prefetch = self._accumulate, self._prefetch
        self._cursor, self._pass_batches = cursor, self._num_in_pass()
        self._data.set_run_length(self._accumulate, epochs)
        ends = [end for end in (epochs and first + epochs, of_run) if end is not None]
        cursor.end_pass, cursor.end = min(ends, default=None), None
        if cursor.end_pass is not None and self._pass_batches:
            cursor.end = cursor.begins[first] + max(0, cursor.end_pass - first) * self._pass_batches
        return cursor

    def _goes_on(self, number: int, cursor: Cursor) -> bool:
        """Whether the loop yields another batch. It waits for other workers if the run has all its steps."""
        data, memory = self._data, self._memory
        _check_grad()
        if number != self._number:
            message = "two loops over one session.shard() at once: the second began, and the first requests a batch"
            raise UsageError(message, fix="call session.shard() once for each of the loops")
        while True:
            data.apply_start()
            if cursor.num_fill:
                return True
            if memory.has_moved and (data.epoch is not None or not data.is_void):
                if data.epoch is not None:
                    return False  # ends the inner loop, so that the loop over epochs can go back
                memory.move()
            if data.has_replayed and not cursor.in_hand:
                data.replayed()
            if not self._is_done():
                # Whether the loop has yielded the batches of all remaining steps.
                has_all = data.covers_last_replay or ((left := self._num_left) is not None and left <= 0)
                return len(cursor.in_hand) == cursor.num_void or not has_all
            if cursor.in_hand or self._is_over():  # other workers may wait for the steps of the batches in hand
                return False

    def _read(self, cursor: Cursor) -> Iterator[tuple[Any, int, bool]]:
        """Read the batches from the cursor on to the end of the loop.

        Each comes with its weight in samples, and with whether it is the last one of its pass.
        """
        number = cursor.pass_of(cursor.next)
        while cursor.end_pass is None or number < cursor.end_pass:
            first, num_batches = max(0, cursor.next - cursor.begins[number]), self._num_in_pass()
            found = self._loader.pass_batches(number, self._division, first)
            num_batches = yield from _marked(found, num_batches - first)
            number += 1
            cursor.begins[number] = cursor.begins[number - 1] + num_batches

    def _num_in_pass(self) -> int:
        """Batches of this rank in a pass; 0: not known. Raises UsageError if the data set has changed its length."""
        if self._shares.num_samples != self._size:
            raise UsageError(
                f"the data set of session.shard() had {self._size} samples, and has {self._shares.num_samples} "
                "now: this rank's position in it is lost",
                fix="give session.shard() the data set of each epoch, or a sampler that draws from the whole one",
            )
        return self._shares.num_batches(self._division[0])

    @property
    def _division(self) -> tuple[int, int]:
        num_workers = max(1, self._progress.num_workers)
        # All processes together get the union batch: each takes every n-th sample.
        return num_workers * self._group_size, self._progress.worker_index + num_workers * self._group_rank


def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """A 64-bit digest of dense tensors, from their first elements and sums; 0 when all of these are zero."""
    # Other rows of a DTensor are in other processes.
    tensors = [cast(Any, tensor).to_local() if is_divided(tensor) else tensor for tensor in tensors]
    dense = [tensor.detach().flatten() for tensor in tensors if not tensor.is_sparse]
    begins = [tensor[:_NUM_DIGESTED].double() for tensor in dense]
    # The sums cover rows beyond the first ones, which many batches do not touch. Each chunk is summed alone, because
    # torch on the CPU converts a whole tensor to float64 before it sums.
    parts = [torch.stack([part.sum(dtype=torch.float64) for part in tensor.split(_SUMMED)]) for tensor in dense]
    sums = [part.sum().reshape(1) for part in parts]
    seen = torch.cat([*begins, *sums]).cpu() if dense else torch.zeros(1, device="cpu")
    if not seen.any():
        return 0
    return int.from_bytes(blake2b(seen.numpy().tobytes(), digest_size=8).digest(), "little")


def check_count(call: str, num: int, least: int = 0) -> int:
    """Raises UsageError unless `num`, given in a `call` of the session, is a whole number of at least `least`."""
    with contextlib.suppress(TypeError):  # a float, a tensor of floats
        if not isinstance(num, bool) and (found := index(num)) >= least:
            return found
    raise UsageError(f"session.{call}{num!r}): a whole number of at least {least} is expected")


def _check_grad() -> None:
    if not torch.is_grad_enabled():
        raise UsageError(
            "a batch of session.shard() was requested under torch.no_grad(): it counts towards this rank's "
            "position in the training data, and training would miss it",
            fix="use a DataLoader for validation data; request training batches outside of no_grad()",
        )


def _marked(batches: Generator[tuple[Any, int], None, int], num: int) -> Generator[tuple[Any, int, bool], None, int]:
    """Yield the batches of a pass, of which `num` are left, with whether each is the last one."""
    while True:
        try:
            found = next(batches)
        except StopIteration as end:
            return int(end.value)
        num -= 1
        yield *found, not num
