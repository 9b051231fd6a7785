"""Which batches this rank's steps were made of, and so where it is in its data: of all loops over `session.shard()`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol
from weakref import WeakSet

import torch

from ....common.errors import UsageError
from ....common.reporting.log import get_logger
from ....common.wire.records import Position
from ...session import Length, Progress

log = get_logger()


class Loop(Protocol):
    """Over batches."""

    hand: Hand

    def end(self) -> None: ...


class Remembering(Protocol):
    """What a loop over batches asks of a script's memory (`Memory`)."""

    @property
    def has_moved(self) -> bool: ...

    def move(self) -> None: ...

    def note(self) -> None: ...

    def replayed(self) -> None: ...


class Hand:
    """Batches that a loop has asked for and no step has taken, by what they weigh."""

    def __init__(self, is_ahead: bool | None = None) -> None:
        self.batch_samples: deque[int] = deque()
        self.num_computed = 0  # backward passes since the last step
        self.is_ahead = is_ahead  # whether batches are asked for before the one at hand is used

    def __len__(self) -> int:
        return len(self.batch_samples)

    def computed(self, is_parted: bool = False) -> None:
        """A backward pass is done; of several optimizers each has some for one batch."""
        if self.is_ahead is None and self.batch_samples:
            self.is_ahead = len(self.batch_samples) > 1
        self.num_computed = 1 if is_parted else self.num_computed + 1

    def drop(self) -> bool:
        had_any = bool(self.batch_samples)
        self.batch_samples.clear()
        return had_any

    @property
    def num_used(self) -> int:
        """Since the last step."""
        return min(len(self.batch_samples), self.num_computed) if self.is_ahead else len(self.batch_samples)

    @property
    def num_samples(self) -> int:
        """Of those."""
        return sum(islice(self.batch_samples, self.num_used))

    @property
    def num_samples_now(self) -> int:
        """Of the batch that is being computed."""
        at = self.num_computed if self.is_ahead else len(self.batch_samples) - 1
        return self.batch_samples[at] if 0 <= at < len(self.batch_samples) else 0

    def take(self) -> tuple[int, int]:
        """What the step just taken was made of: all that was drawn, or, of a loop that asks ahead, as much as there
        were backward passes."""
        num, self.num_computed = self.num_used, 0
        return num, sum(self.batch_samples.popleft() for _ in range(num))


class Taken:
    """Batches that have gone into steps, of all loops over `session.shard()`: where this rank is in its data."""

    def __init__(
        self, progress: Callable[[], Progress], optimizers: Sequence[torch.optim.Optimizer], length: Length
    ) -> None:
        self._progress, self._optimizers, self.length = progress, optimizers, length
        self.epoch_batches = 0  # of this rank
        self.run_steps = 0  # of the run, where this worker has found them out
        self._has_compared = False
        self._loops: WeakSet[Loop] = WeakSet()
        self._unused: list[Hand] = []  # what loops over an epoch had in hand when it ended
        self.memory: Remembering | None = None
        self.is_used = False  # this rank's batches come from here
        self.num_samples = 0  # of the data set
        self._num_starts = -1
        self._num_moves = 0
        self._begins_at = 0
        self._num_taken = 0  # since then
        self._ends_at = 0  # of what is computed once more
        self.per_step = 0  # in the newest step; 0 before the first
        self.epoch: int | None = None  # of the script's loop over epochs
        self.epoch_length = 0  # batches of it; 0: not known
        self._epoch_at = 0  # the place where it began
        self._came = (0, 0)  # the epoch where this process began, and the place where that began

    @property
    def position(self) -> int:
        """Batches of this rank that are behind it."""
        self._follow()
        return self._begins_at + self._num_taken

    def _follow(self) -> None:
        """What was taken before the run said where to start is forgotten."""
        progress = self._progress()
        if self._num_starts != progress.num_starts:
            self._num_starts = progress.num_starts
            self._go(progress.batches)

    def _go(self, position: int) -> None:
        self._begins_at, self._num_taken = position, 0
        self._num_moves += 1
        self._unused.clear()

    @property
    def moves(self) -> int:
        """How often batches have been to be taken from elsewhere than after the last one."""
        self._follow()
        return self._num_moves

    @property
    def num_drawn(self) -> int:
        """Batches of the epoch that are behind this rank, and those of loops that have ended."""
        return self.position - self._epoch_at + sum(map(len, self._unused))

    def where(self, step: int, local_steps: int, num_passed: int = 0) -> Position:
        """This rank's place in the data, at the beginning of a contribution or `num_passed` batches behind it."""
        position = self.position + num_passed
        if self.epoch is None:
            return Position(step, local_steps, position)
        return Position(step, local_steps, position, self.epoch, max(0, position - self._epoch_at))

    # ---- the script's own loop over epochs ----------------------------------------------------

    def next_epoch(self) -> None:
        """What loops have in hand still belongs to the next step."""
        assert self.epoch is not None
        for loop in self._loops:
            loop.end()
        length = self.epoch_length or self.num_drawn  # before where the run began there are epochs without a batch
        self._epoch_at += min(self.num_drawn, length)
        self.epoch, self.epoch_length = self.epoch + 1, 0

    def leave(self, hand: Hand) -> None:
        if hand:
            self._unused.append(hand)

    # ---- going back, and on -------------------------------------------------------------------

    def go_back(self, position: Position) -> None:
        """A contribution that began there is to be computed once more."""
        self._ends_at = self.position
        self._go(position.batches)
        self._stand_in(
            position.epoch or 0, position.batches - position.epoch_batches if position.epoch is not None else 0
        )

    def begin_anew(self) -> None:
        """Nothing is known of where the script was."""
        self._stand_in(0, 0)

    def _stand_in(self, epoch: int, begins_at: int) -> None:
        self._came = epoch, begins_at
        if self.epoch is not None:
            self.begin_epochs()

    def begin_epochs(self) -> None:
        """The script's loop over epochs begins, or goes back, where this process has come to."""
        (self.epoch, self._epoch_at), self.epoch_length = self._came, 0

    @property
    def epoch_now(self) -> int:
        """Of the script's loop, or of the next batch."""
        if self.epoch is not None:
            return self.epoch
        return self.position // self.epoch_batches if self.epoch_batches else self._came[0]

    def go_on(self) -> None:
        """It has been computed; what comes next is where the run said."""
        if self.position != self._ends_at:
            self._go(self._ends_at)

    def is_through(self, hand: Hand) -> bool:
        """All batches of what is computed once more have been used and no step was taken: a scaler found infinities."""
        return 0 < len(hand) <= hand.num_computed and self._has_again(hand)

    def ends_with(self, hand: Hand) -> bool:
        """What is computed once more is the last of the run, and the loop has all of it, if it asks ahead or not."""
        return self._progress().is_last and self._has_again(hand)

    def _has_again(self, hand: Hand) -> bool:
        """All batches of what is computed once more were asked for."""
        if not hand or not self._progress().is_replaying:
            return False
        return self.position + sum(map(len, (*self._unused, hand))) >= self._ends_at

    # ---- steps --------------------------------------------------------------------------------

    def add(self, loop: Loop) -> None:
        if not self.is_used:
            for optimizer in self._optimizers:
                parameters = [
                    param for group in optimizer.param_groups for param in group["params"] if param.requires_grad
                ]
                parameters[-1].register_post_accumulate_grad_hook(self._computed)
        self.is_used = True
        self._loops.add(loop)

    @property
    def _hands(self) -> Iterator[Hand]:
        yield from self._unused
        yield from (loop.hand for loop in self._loops)

    @property
    def is_parted(self) -> bool:
        """Several optimizers step by turns."""
        return len(self._optimizers) > 1

    @property
    def tells_steps(self) -> bool:
        """Batches come from here, and one that was asked for goes into the next step()."""
        return self.is_used and not any(hand.is_ahead for hand in self._hands)

    @property
    def has_drawn(self) -> bool:
        """A batch was asked for since the last training step."""
        return any(map(len, self._hands))

    @property
    def num_used(self) -> int:
        """Batches since the last step."""
        # Two loops side by side draw at the same place.
        return sum(map(len, self._unused)) + max((loop.hand.num_used for loop in self._loops), default=0)

    @property
    def num_samples_at_hand(self) -> int:
        """Of what the next `step` is made of."""
        return sum(hand.num_samples for hand in self._hands)

    def num_samples_now(self) -> int:
        """Of the batch that is being computed; 0 where it comes from elsewhere."""
        return next((hand.num_samples_now for hand in self._hands if len(hand)), 0)

    def _computed(self, _: torch.Tensor) -> None:
        for hand in self._hands:
            hand.computed(self.is_parted)

    def step(self) -> tuple[int, int]:
        """A training step is done: (batches, what they weigh) that it was made of; zeros when none came from here."""
        self._follow()
        ended = [hand.take() for hand in self._unused]
        self._unused = [hand for hand in self._unused if hand]
        found = [loop.hand.take() for loop in self._loops]
        # Two loops side by side draw at the same place.
        num_batches = sum(num for num, _ in ended) + max((num for num, _ in found), default=0)
        self._num_taken += num_batches if self.is_used else 1
        self.per_step = max(1, num_batches)
        self._measure(self._progress())
        return num_batches, sum(num_samples for _, num_samples in (*ended, *found))

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
        of_loop, total = length.of_loop(self.epoch_batches, self.per_step), progress.total_steps
        if of_loop is not None and total is not None and of_loop > total:
            setting = "run.steps" if length.epochs is None else f"run.epochs: {length.epochs}"
            message = f"the run ends after {total} training steps ({setting}), this script's loop would take {of_loop}"
            log.warning("cut_short", reason=message, fix=f"--steps {of_loop}; or leave it out, and the loop decides")

    def drop(self) -> bool:
        """Forget what was asked for before the run was known to end; False when that is nothing."""
        return sum(hand.drop() for hand in self._hands) > 0  # each of them drops
