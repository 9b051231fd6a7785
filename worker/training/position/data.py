"""Counts the batches that this rank's steps have used, in all loops over `session.shard()`: its position."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from ....common.errors import UsageError
from ....common.reporting.log import get_logger
from ....common.wire.records import Position
from ...session import Length, Progress

if TYPE_CHECKING:
    from ..batches import Batches
    from .memory import Memory

log = get_logger()


class FetchedBatches:
    """Batches that a loop has fetched and no step has used yet. Stores each batch's number of samples."""

    def __init__(self, is_ahead: bool | None = None) -> None:
        self.batch_samples: deque[int] = deque()
        self.num_computed = 0  # backward passes since the last step
        self.is_ahead = is_ahead  # whether the loop prefetches; the first backward pass shows it. None: not known yet

    def __len__(self) -> int:
        return len(self.batch_samples)

    def note_backward(self, is_parted: bool = False) -> None:
        """A backward pass is done. With several optimizers there are several passes for one batch."""
        if self.is_ahead is None and self.batch_samples:
            self.is_ahead = len(self.batch_samples) > 1
        self.num_computed = 1 if is_parted else self.num_computed + 1

    def drop(self) -> bool:
        had_any = bool(self.batch_samples)
        self.batch_samples.clear()
        return had_any

    @property
    def num_used(self) -> int:
        """Batches used since the last step: all of them, or one per backward pass if the loop fetches ahead."""
        return min(len(self.batch_samples), self.num_computed) if self.is_ahead else len(self.batch_samples)

    @property
    def num_samples(self) -> int:
        """Samples of the used batches."""
        return sum(islice(self.batch_samples, self.num_used))

    @property
    def num_samples_now(self) -> int:
        """Samples of the batch that the model computes now."""
        at = self.num_computed if self.is_ahead else len(self.batch_samples) - 1
        return self.batch_samples[at] if 0 <= at < len(self.batch_samples) else 0

    def take(self) -> None:
        """Remove the used batches, after a step."""
        for _ in range(self.num_used):
            self.batch_samples.popleft()
        self.num_computed = 0


class DataPosition:
    """Batches that steps have used, in all loops over `session.shard()`: this rank's position in its data."""

    def __init__(
        self, progress: Callable[[], Progress], optimizers: Sequence[torch.optim.Optimizer], length: Length
    ) -> None:
        self._progress, self._optimizers, self.length = progress, optimizers, length
        self.batches_per_epoch = 0  # batches of this rank in an epoch
        self.run_steps = 0  # training steps of the run, if this worker has computed them
        self._has_set_run_length = False
        self._loops: WeakSet[Batches] = WeakSet()
        self._ended_loops: list[
            FetchedBatches
        ] = []  # batches that loops over an epoch had fetched and not used at its end
        self._in_pass: set[int] = set()  # numbers of the parameters that the newest backward pass has reached
        self.memory: Memory | None = None
        self._first: object = None  # the optimizer that has stepped first, of several
        self.uses_shard = False  # this rank's batches come from `session.shard()`
        self.num_samples = 0  # samples of the data set
        self._num_starts = -1
        self._num_jumps = 0
        self._start_position = 0
        self._num_used_since_start = 0  # batches taken since `_start_position`
        self._replay_end = 0  # position where the replay ends
        self.batches_per_step = 0  # batches in the newest step; 0 before the first
        self.epoch: int | None = None  # of the script's loop over epochs
        self.current_epoch_batches = 0  # batches in the epoch; 0: not known
        self._epoch_at = 0  # position where the epoch began
        self._first_epoch = (0, 0)  # the epoch in which this process began, and the position where that epoch began

    @property
    def position(self) -> int:
        """Batches of this rank that steps have used."""
        self._apply_new_start()
        return self._start_position + self._num_used_since_start

    def _apply_new_start(self) -> None:
        """Go to the run's start position after a START, and forget batches taken before it."""
        progress = self._progress()
        if self._num_starts != progress.num_starts:
            self._num_starts = progress.num_starts
            self._jump_to(progress.batches)

    def _jump_to(self, position: int) -> None:
        self._start_position, self._num_used_since_start = position, 0
        self._num_jumps += 1
        self._ended_loops.clear()

    @property
    def num_jumps(self) -> int:
        """How often the position has jumped."""
        self._apply_new_start()
        return self._num_jumps

    @property
    def num_drawn(self) -> int:
        """Batches of the epoch that steps have used, or that ended loops have fetched."""
        return self.position - self._epoch_at + self.num_ended

    @property
    def num_ended(self) -> int:
        """Batches that ended loops have fetched and no step has used."""
        return sum(map(len, self._ended_loops))

    def position_record(self, step: int, local_steps: int, num_passed: int = 0) -> Position:
        """The position at the beginning of a contribution, or `num_passed` batches after it."""
        position = self.position + num_passed
        if self.epoch is None:
            return Position(step, local_steps, position)
        return Position(step, local_steps, position, self.epoch, max(0, position - self._epoch_at))

    # ---- the script's own loop over epochs ----------------------------------------------------

    def next_epoch(self) -> None:
        """Begin the next epoch. Batches that loops have fetched still belong to the next step."""
        assert self.epoch is not None
        for loop in self._loops:
            loop.end_epoch()
        length = (
            self.current_epoch_batches or self.num_drawn
        )  # an epoch that lies wholly before the start position has none
        self._epoch_at += min(self.num_drawn, length)
        self.epoch, self.current_epoch_batches = self.epoch + 1, 0

    def end_loop(self, loop: Batches) -> None:
        """The loop has ended. The next loop begins after its batches, which belong to the next step."""
        if not any(other.fetched for other in self._loops if other is not loop):  # parallel loops share positions
            loop.end_epoch()

    def keep_unused(self, fetched: FetchedBatches) -> None:
        if fetched:
            self._ended_loops.append(fetched)

    # ---- going back, and on -------------------------------------------------------------------

    def start_replay(self, position: Position) -> None:
        """Go back to the beginning of a contribution, to replay it."""
        self._replay_end = self.position
        self._jump_to(position.batches)
        self._set_first_epoch(
            position.epoch or 0, position.batches - position.epoch_batches if position.epoch is not None else 0
        )

    def restart_epochs(self) -> None:
        """Start at the first epoch, because the script's position is unknown."""
        self._set_first_epoch(0, 0)

    def _set_first_epoch(self, epoch: int, begins_at: int) -> None:
        self._first_epoch = epoch, begins_at
        if self.epoch is not None:
            self.start_epochs()

    def start_epochs(self) -> None:
        """Start the script's loop over epochs, or move it back, at the epoch where this process began."""
        (self.epoch, self._epoch_at), self.current_epoch_batches = self._first_epoch, 0

    @property
    def epoch_now(self) -> int:
        """The epoch of the script's loop; without one, the epoch of the next batch."""
        if self.epoch is not None:
            return self.epoch
        return self.position // self.batches_per_epoch if self.batches_per_epoch else self._first_epoch[0]

    def end_replay(self) -> None:
        """The replay is complete: continue at the run's position."""
        if self.position != self._replay_end:
            self._jump_to(self._replay_end)

    def has_used_replay(self, fetched: FetchedBatches) -> bool:
        """Whether the loop used all batches of the replay without a step, because a scaler found infinities."""
        return 0 < len(fetched) <= fetched.num_computed and self._has_fetched_replay(fetched)

    def has_fetched_last_replay(self, fetched: FetchedBatches) -> bool:
        """Whether the loop has fetched all batches of a replay that ends the run."""
        return self._progress().is_last and self._has_fetched_replay(fetched)

    def _has_fetched_replay(self, fetched: FetchedBatches) -> bool:
        """Whether the loop has fetched all batches of the replay."""
        if not fetched or not self._progress().is_replaying:
            return False
        return self.position + sum(map(len, (*self._ended_loops, fetched))) >= self._replay_end

    # ---- steps --------------------------------------------------------------------------------

    def add(self, loop: Batches) -> None:
        if not self.uses_shard:
            groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
            for number, param in enumerate(param for group in groups for param in group["params"]):
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(partial(self._has_gradient, number))
        self.uses_shard = True
        self._loops.add(loop)

    @property
    def _all_fetched(self) -> Iterator[FetchedBatches]:
        yield from self._ended_loops
        yield from (loop.fetched for loop in self._loops)

    @property
    def is_parted(self) -> bool:
        """Whether several optimizers step by turns."""
        return len(self._optimizers) > 1

    def begins(self, part: object) -> bool:
        """Whether this step() of one of several optimizers begins a training step.

        A training step is one batch. If no loop over `session.shard()` fetches ahead, the first step() after a batch
        was requested begins a training step. In other loops each step() of the first optimizer begins one.
        """
        if not self.is_parted:
            return True
        self._first = self._first or part
        all_fetched = list(self._all_fetched)
        if self.uses_shard and not any(fetched.is_ahead for fetched in all_fetched):
            return any(map(len, all_fetched))
        return part is self._first

    @property
    def num_used(self) -> int:
        """Batches that were used since the last step."""
        # Parallel loops yield the same positions, so only the longest counts.
        in_loops = max((loop.fetched.num_used for loop in self._loops), default=0)
        return sum(fetched.num_used for fetched in self._ended_loops) + in_loops

    @property
    def next_step_samples(self) -> int:
        """Samples of the next step."""
        return sum(fetched.num_samples for fetched in self._all_fetched)

    def num_samples_now(self) -> int:
        """Samples of the batch that the model computes now; 0: it does not come from `session.shard()`."""
        return next((fetched.num_samples_now for fetched in self._all_fetched if len(fetched)), 0)

    def _has_gradient(self, number: int, _: torch.Tensor) -> None:
        """Count a backward pass at its first gradient. A pass need not reach every parameter."""
        if not self._in_pass or number in self._in_pass:
            self._in_pass.clear()
            for fetched in self._all_fetched:
                fetched.note_backward(self.is_parted)
        self._in_pass.add(number)

    def step(self) -> tuple[int, int]:
        """Count a training step. Returns its (batches, samples); zeros if no batch came from `session.shard()`."""
        self._apply_new_start()
        self._in_pass.clear()
        num_batches, num_samples = self.num_used, self.next_step_samples
        for fetched in self._all_fetched:
            fetched.take()
        self._ended_loops = [fetched for fetched in self._ended_loops if fetched]
        self._num_used_since_start += num_batches if self.uses_shard else 1
        self.batches_per_step = max(1, num_batches)
        self._set_run_length(self._progress())
        return num_batches, num_samples

    def steps_of_run(self, per_step: int) -> int | None:
        """Training steps of the run, for `per_step` batches per step; None: the run has no number of steps."""
        return self._progress().total_steps or self.length.of_run(self.batches_per_epoch, per_step)

    def _set_run_length(self, progress: Progress) -> None:
        """Compute the run's length at the first step, before that step counts.

        Raises UsageError if `run.epochs` is set and the length of an epoch is not known.
        """
        length = self.length
        if self._has_set_run_length:
            return
        self._has_set_run_length = True
        if length.epochs is not None and not self.batches_per_epoch:
            raise UsageError(
                f"run.epochs is {length.epochs}, and the length of an epoch of this script's own loader is not known",
                fix="--steps N instead, or loop over session.shard(dataset)",
            )
        if found := length.of_run(self.batches_per_epoch, self.batches_per_step):
            self.run_steps = found
            if progress.total_steps is None:
                progress.limit(found)
        of_loop, total = length.of_loop(self.batches_per_epoch, self.batches_per_step), progress.total_steps
        if of_loop is not None and total is not None and of_loop > total:
            setting = "run.steps" if length.epochs is None else f"run.epochs: {length.epochs}"
            message = f"the run ends after {total} training steps ({setting}); this script's loop has {of_loop}"
            log.warning("cut_short", reason=message, fix=f"--steps {of_loop}; without --steps the loop sets the length")

    def drop(self) -> bool:
        """Discard batches that were fetched before the end of the run was known. Returns False if there were none."""
        return sum(fetched.drop() for fetched in self._all_fetched) > 0  # a sum, so that each drops its batches
