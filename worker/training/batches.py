"""What `session.shard()` gives: this rank's batches until the run is over, and which of them a step was made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import Any
from weakref import WeakSet

import torch

from ...common.errors import UsageError
from ...common.reporting.log import get_logger
from ..session import Length, Progress
from .data import Shares, sharded_batches, step_seed

log = get_logger()

_NUM_DIGESTED = 64  # elements of each tensor


class Taken:
    """Batches that have gone into steps, of all loops over `session.shard()`: where this rank is in its data."""

    def __init__(self, progress: Callable[[], Progress], optimizer: torch.optim.Optimizer, length: Length) -> None:
        self._progress, self._optimizer, self.length = progress, optimizer, length
        self.epoch_batches = 0  # of this rank
        self.run_steps = 0  # of the run, where this worker has found them out
        self._has_compared = False
        self._loops: WeakSet[Batches] = WeakSet()
        self.is_used = False  # this rank's batches come from here
        self.num_samples = 0  # of the data set
        self._num_starts = -1
        self._num_taken = 0  # since the run said where to start
        self.per_step = 0  # in the newest step; 0 before the first

    @property
    def place(self) -> int:
        """Batches of this rank that are behind it."""
        progress = self._progress()
        if self._num_starts != progress.num_starts:
            self._num_starts, self._num_taken = progress.num_starts, 0
        return progress.batches + self._num_taken

    def add(self, loop: Batches) -> None:
        if not self.is_used:
            parameters = [one for group in self._optimizer.param_groups for one in group["params"] if one.requires_grad]
            parameters[-1].register_post_accumulate_grad_hook(self._computed)
        self.is_used = True
        self._loops.add(loop)

    def _computed(self, _: torch.Tensor) -> None:
        for loop in self._loops:
            loop.computed()

    def step(self) -> tuple[int, int]:
        """A training step is done: (batches, what they weigh) that it was made of; zeros when none came from here."""
        self.place  # noqa: B018  what was taken before the run moved is forgotten
        found = [loop.take() for loop in self._loops]
        num_batches = max((num for num, _ in found), default=0)  # two loops side by side draw at the same place
        self._num_taken += num_batches if self.is_used else 1
        self.per_step = max(1, num_batches)
        self._measure(self._progress())
        return num_batches, sum(weight for _, weight in found)

    def steps_of_run(self, per_step: int) -> int | None:
        """Training steps of the run, of so many batches each; None where it has no number of them."""
        return self._progress().total_steps or self.length.of_run(self.epoch_batches, per_step)

    def _measure(self, progress: Progress) -> None:
        """With the first step it is known how many there are. Before it counts itself. UsageError for `epochs` of data
        that nobody here knows."""
        length = self.length
        if self._has_compared:
            return
        self._has_compared = True
        if length.epochs is not None and not self.epoch_batches:
            raise UsageError(
                f"run.epochs is {length.epochs}, and how long an epoch of this script's own loader is nobody knows",
                fix="--steps N instead, or loop over session.shard(dataset)",
            )
        if found := length.of_run(self.epoch_batches, self.per_step):
            self.run_steps = found
            if progress.total_steps is None:
                progress.limit(found)
        own, total = length.of_loop(self.epoch_batches, self.per_step), progress.total_steps
        if own is not None and total is not None and own > total:
            given = "run.steps" if length.epochs is None else f"run.epochs: {length.epochs}"
            told = f"the run ends after {total} training steps ({given}), this script's loop would take {own}"
            log.warning("cut_short", reason=told, fix=f"--steps {own}; or leave it out, and the loop decides")

    def drop(self) -> bool:
        """Forget what was asked for before the run was known to end; False when that is nothing."""
        return sum(loop.drop() for loop in self._loops) > 0  # each of them drops


class Batches:
    """An iterator with a length. What it gives belongs to a step only when the step is taken: a loop may ask for
    batches before it uses them, as trainers do."""

    def __init__(
        self,
        shares: Shares,
        taken: Taken,
        progress: Callable[[], Progress],
        is_over: Callable[[], bool],
        options: dict[str, Any],
        epochs: int | None = None,
    ) -> None:
        self._shares, self._taken, self._progress = shares, taken, progress
        self._is_over, self._options, self._epochs = is_over, options, epochs
        self._drawn: deque[int] = deque()  # weights of batches that no step has taken
        self._num_computed = 0  # backward passes since the last step
        self._is_ahead: bool | None = None  # whether batches are asked for before the one at hand is used
        self._num_starts = -1
        self._batches: Iterator[tuple[Any, int]] = iter(())
        taken.epoch_batches = shares.num_batches(max(1, progress().num_workers))  # says at once what cannot be
        self._end = self._end_of_loop()
        taken.add(self)
        taken.num_samples = len(shares.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Batches:
        if self._end is not None and self._at >= self._end:
            self._end = self._end_of_loop()
        return self

    def __len__(self) -> int:
        """Batches left for this rank in the loop; of several to a step, as many as the newest step had."""
        left = [] if self._end is None else [self._end - self._at]
        if (steps := self._num_left) is not None:
            left.append(steps * max(1, self._taken.per_step) - len(self._drawn))
        if not left:  # run.epochs: before the first step
            left.append((self._taken.length.epochs or 0) * self._taken.epoch_batches - self._at)
        return max(0, min(left))

    @property
    def _num_left(self) -> int | None:
        """Training steps of the run that are to be taken; None where it has no number of them, or not yet."""
        total, progress = self._progress().total_steps, self._progress()
        return None if total is None else max(0, total - progress.position)

    @property
    def _at(self) -> int:
        """Batches of this rank that are behind it, or asked for."""
        return self._taken.place + len(self._drawn)

    def _end_of_loop(self) -> int | None:
        """So many batches are behind this rank when the loop ends; None: the end of the run is."""
        each, progress = self._taken.epoch_batches, self._progress()
        if progress.total_steps is not None or not self._taken.length.is_open:
            return None
        return each * (self._at // each + 1 if self._epochs is None else self._epochs)

    def __next__(self) -> Any:
        if self._has_all or (self._end is not None and self._at >= self._end) or self._is_over():
            raise StopIteration
        progress, place = self._progress(), self._taken.place
        if self._num_starts != progress.num_starts:  # at first, and when the run has moved without this worker
            self._num_starts = progress.num_starts
            self._drawn.clear()
            self._batches = sharded_batches(self._shares, lambda: self._division, place, **self._options)
        torch.manual_seed(step_seed(self._shares.seed, progress.rank or 0, place + len(self._drawn)))
        batch, weight = next(self._batches)
        self._drawn.append(weight)
        return batch

    @property
    def weight(self) -> int:
        """Of the batch given last: its samples, as they count in a mean."""
        return self._drawn[-1]

    def void(self) -> None:
        """What was asked for since the last step weighs nothing: its gradient was thrown away."""
        self._drawn = deque([0] * len(self._drawn))

    @property
    def _division(self) -> tuple[int, int]:
        progress = self._progress()
        return max(1, progress.num_workers), progress.worker_index

    @property
    def _has_all(self) -> bool:
        """A loop that asks ahead has what its last steps need: these are still to be taken, so it must not wait."""
        return bool(self._is_ahead and self._taken.per_step and self._num_left and not len(self))

    def computed(self) -> None:
        """A backward pass is done."""
        if self._is_ahead is None and self._drawn:
            self._is_ahead = len(self._drawn) > 1
        self._num_computed += 1

    def drop(self) -> bool:
        had_any = bool(self._drawn)
        self._drawn.clear()
        return had_any

    def take(self) -> tuple[int, int]:
        """What the step just taken was made of: all that was drawn, or, of a loop that asks ahead, as much as there
        were backward passes."""
        num = min(len(self._drawn), self._num_computed) if self._is_ahead else len(self._drawn)
        self._num_computed = 0
        return num, sum(self._drawn.popleft() for _ in range(num))


def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """Of the beginnings of dense tensors, 64 bits; 0 when all are zero, as they are for many batches."""
    begins = [tensor.detach().flatten()[:_NUM_DIGESTED].double() for tensor in tensors if not tensor.is_sparse]
    seen = torch.cat(begins).cpu() if begins else torch.zeros(1)
    if not seen.any():
        return 0
    return int.from_bytes(blake2b(seen.numpy().tobytes(), digest_size=8).digest(), "little")


def read_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those for the loader. UsageError for those that `session.shard()` cannot keep to."""
    instead = {
        "sampler": "give session.shard() a torch.utils.data.Subset of the samples you want, or weigh them in the loss",
        "batch_sampler": "give session.shard() batch_size=, shuffle= and drop_last=",
    }
    for name, fix in instead.items():
        if options.get(name) is not None:
            raise UsageError(f"session.shard() divides the data itself and cannot follow a {name} of yours", fix=fix)
    return {name: value for name, value in options.items() if name not in instead}
