"""This rank's position in its data: the cursors of all loops over `session.shard()`, and the length of the run.

A loop takes the first free cursor, so loops one after another share one, and loops side by side have one each. Loop i
of a cursor covers the passes after those of loop i - 1. So a process that takes over a rank reads nothing in the loops
that lie behind the rank, and goes on in the right one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple
from weakref import ReferenceType, WeakSet, ref

import torch

from ....common.errors import UsageError
from ....common.reporting.log import get_logger
from ....common.wire.records import Position
from ...session import Length
from ...strategies.base import Strategy
from ...tensors.packed import unpack

log = get_logger()

# ---- cursor --------------------------------------------------------------------------------------
# The position of one loop over `session.shard()`: which batches it yielded, and which of them steps have used. Pure.
#
#     yielded(a)  yielded(b)  step       yielded(c)   move(...)        step               yielded(p)
#     in hand: a  a b         b          b c          b c (both void)  c, uses b: void    c p
#
# A step uses exactly `accumulate` batches, in the order in which they were yielded. At most `prefetch` newer ones may
# be in hand then. When the run moves (the server went back, or went on without this rank), the batches in hand are
# void: the steps that use them contribute nothing. If a void step would also use newer batches, these are fillers,
# and the loop yields them again.


class InHand(NamedTuple):
    """A batch that was yielded and that no step has used yet."""

    num_samples: int
    end: int  # the position behind it
    is_last: bool  # of its pass


class Cursor:
    """Batches are numbered from 0, over all passes. `accumulate` may change between steps."""

    def __init__(self) -> None:
        self.loop: ReferenceType[object] | None = None  # the newest one
        self.epoch: int | None = None  # in which it began; None: outside of the script's loop over epochs
        self.epoch_at = 0  # where the script's epoch began
        self.accumulate, self.prefetch = 1, 0
        self.position = self.next = 0  # behind the newest used batch; number of the next batch to yield
        self.begins = {0: 0}  # by pass: the number of its first batch
        self.in_hand: deque[InHand] = deque()  # the oldest first
        self.num_void = 0  # of those in hand, the oldest
        self.num_fill = 0  # fillers that are still to be yielded
        self.num_moves = 0  # grows when the number of the next batch jumps
        self.num_yielded = self.num_used = 0
        self.is_fresh = False  # a batch was yielded since the last step
        self.has_ended = True  # no loop is open
        self.end: int | None = None  # position where the newest loop ends; None: not known
        self.end_pass: int | None = 0  # the pass that follows the newest loop; None: the loop ends with the run

    def yielded(self, num_samples: int, is_last: bool = False) -> None:
        """The loop yields the next batch, or a filler."""
        self.is_fresh = True
        self.num_yielded += 1
        if self.num_fill:
            self.num_fill, self.num_void = self.num_fill - 1, self.num_void + 1
            self.num_moves += not self.num_fill
        else:
            self.next += 1
        self.in_hand.append(InHand(num_samples, self.next, is_last))

    @property
    def takes_part(self) -> bool:
        """Whether the next step uses batches of this loop: it yielded one since the last step, or only hands out."""
        return self.is_fresh or (self.has_ended and bool(self.in_hand))

    def due(self) -> int:
        """Batches that a step uses now. Raises UsageError if the loop did not yield as many as it said."""
        num = len(self.in_hand)
        if 0 <= num - self.accumulate <= self.prefetch:
            return self.accumulate
        for index, item in enumerate(self.in_hand, 1):  # the last step of a pass may use fewer
            is_end = item.is_last or (self.has_ended and index == num)
            if index < self.accumulate and is_end and num - index <= self.prefetch:
                return index
        stated = f"accumulate={self.accumulate}, prefetch={self.prefetch}"
        message = (
            f"step() with {num} unused batch{'es' * (num != 1)} of session.shard() ({self.num_yielded} yielded, "
            f"{self.num_used} used), which says {stated}"
        )
        left = next((index for index, item in enumerate(self.in_hand, 1) if item.is_last), num)
        if left < num:
            message += f"; the oldest {left} ended the pass before"
            fix = (
                "step at the last batch of a pass too (i + 1 == len(batches)), or session.skip() for each left over, "
                "before a break too; a DataLoader for data that is not trained on"
            )
        elif num < self.accumulate:
            fix = f"session.shard(..., accumulate={max(1, num)}), or batches.accumulate = {num} before this step"
        else:
            fix = (
                f"accumulate={num - self.prefetch} if a step uses several batches; prefetch={num - self.accumulate} if "
                "the loop fetches ahead; session.skip() for each batch that no step uses, before a break too (of two "
                "loops in zip(), the shorter one comes first); a DataLoader for data that is not trained on"
            )
        raise UsageError(message, fix=fix)

    def use(self, num: int) -> int:
        """A step uses the oldest `num` batches. Returns their samples, without those of void batches."""
        num_samples = 0
        for _ in range(num):
            item = self.in_hand.popleft()
            if self.num_void:
                self.num_void -= 1
            else:
                num_samples += item.num_samples
                self.position = max(self.position, item.end)
        self.num_used += num
        self.is_fresh = False
        return num_samples

    @property
    def current(self) -> int:
        """Index of the batch that the script computes now, among those in hand."""
        num_ahead = max(0, self.prefetch - 1) if self.has_ended else self.prefetch
        return max(0, len(self.in_hand) - 1 - num_ahead)

    def skip(self) -> None:
        """The script drops the batch that it computes now: no step will use it."""
        if not self.in_hand:
            return
        index = self.current
        item = self.in_hand[index]
        del self.in_hand[index]
        self.num_used += 1
        if index < self.num_void:
            self.num_void -= 1
        else:
            self.position = max(self.position, item.end)
        self.is_fresh &= len(self.in_hand) > self.prefetch

    def move(self, position: int) -> None:
        """The run moved: what is in hand is void, and the loop goes on at `position`."""
        self.num_void = len(self.in_hand)
        self.position = self.next = position
        self.num_moves += 1
        self.num_fill = 0

    def fill(self, num_steps: int) -> None:
        """Yield as many fillers as `num_steps` void steps need."""
        self.num_fill = 0 if self.has_ended else max(0, num_steps * self.accumulate - self.num_void)

    @property
    def num_void_steps(self) -> int:
        return -(-self.num_void // max(1, self.accumulate))

    def go_to(self, number: int) -> None:
        """Skip the batches before this one: a loop was left early."""
        if number > self.next:
            self.next = number
            self.num_moves += 1

    def pass_of(self, number: int) -> int:
        """The pass that has this batch; the newest known one if it is beyond."""
        return max((index for index, first in self.begins.items() if first <= number), default=min(self.begins))


# ---- data ----------------------------------------------------------------------------------------


LOOPS = "loops"  # in the script's state: of several loops, where each is, and where its epoch began


class DataPosition:
    """All cursors of this process. The position, the samples of a step and its batches are sums over them."""

    def __init__(self, strategy: Strategy, optimizers: Sequence[torch.optim.Optimizer], length: Length) -> None:
        self.strategy, self.progress, self.length = strategy, strategy.progress, length
        self.optimizers, self.is_parted = optimizers, len(optimizers) > 1  # several optimizers step by turns
        self.cursors = [Cursor()]
        self._waiting: WeakSet[object] = WeakSet()  # loops that have not begun
        self.is_sent = False  # each contribution has the script's position
        self.has_begun = self.is_marked = False  # a batch was requested or a step taken; mark() was called
        self.uses_shard = False  # this rank's batches come from `session.shard()`
        self.num_samples = 0  # samples of the data set
        self.accepts_other_data = False  # the run's data set may have another length
        self.batches_per_epoch = 0  # batches of this rank in a pass; 0: not known
        self.run_steps = 0  # training steps of the run, if this worker has computed them
        self.has_read_all = False  # a loop has read all its passes
        self._has_run_length = False
        self._first: object = None  # the optimizer that has stepped first, of several
        self._next: list[tuple[Cursor, int]] = []  # the cursors whose batches the next step uses, and how many
        self._num_starts = -1
        self.has_moved = False  # the run went on elsewhere than behind this process's newest step, without `shard()`
        self._num_reported = 0  # the position behind the newest contribution
        self._replay_end = 0  # position where the replay ends
        self.epoch: int | None = None  # of the script's loop over epochs
        self._first_epoch = (0, 0)  # the epoch in which this process began, and the position where that epoch began

    @property
    def position(self) -> int:
        """Batches of this rank that steps have used."""
        self.apply_start()
        return sum(cursor.position for cursor in self.cursors)

    # ---- where the run is ---------------------------------------------------------------------

    def apply_start(self) -> None:
        """Go to the run's start position after a START. Batches that were yielded before it are void."""
        progress = self.progress
        if self._num_starts == progress.num_starts:
            return
        is_first, self._num_starts = self._num_starts < 0, progress.num_starts
        self.has_moved |= not (is_first or self.uses_shard) and progress.row.batches != self.cursors[0].position
        begun = None
        if self.is_sent and (self.uses_shard or self.is_parted or self.is_marked):
            begun = self.beginning()
        self._replay_end = self._num_reported = progress.row.batches
        self._move(progress.row.batches if begun is None else begun.batches)

    def _move(self, position: int) -> None:
        """Move to a position. Of several cursors, the script's saved state has the positions of the others."""
        for cursor, at in zip(self.cursors[1:], self._saved()[1:], strict=True):
            cursor.move(at)
        self.cursors[0].move(max(0, position - sum(cursor.position for cursor in self.cursors[1:])))
        num_steps = max(cursor.num_void_steps for cursor in self.cursors)
        for cursor in self.cursors:
            cursor.fill(num_steps)

    def _saved(self, of_epoch: bool = False) -> list[int]:
        """By cursor: where it is, or where its epoch began, as the rank's saved state has it; 0 if it does not."""
        begun = self.strategy.begun() if self.is_sent else None
        found = [] if begun is None else [int(item[of_epoch]) for item in unpack(begun.payload).get(LOOPS, [])]
        return [*found, *[0] * len(self.cursors)][: len(self.cursors)]

    @property
    def is_void(self) -> bool:
        """Whether batches in hand were yielded before the run moved."""
        if self._num_starts != self.progress.num_starts:
            self.apply_start()
        return self.uses_shard and any(cursor.num_void or cursor.num_fill for cursor in self.cursors)

    @property
    def has_in_hand(self) -> bool:
        """Whether a loop has yielded batches that no step has used."""
        return any(cursor.in_hand for cursor in self.cursors)

    def forget(self) -> None:
        """Discard void batches whose steps the script does not take, at the end of its epoch."""
        for cursor in self.cursors:
            cursor.use(cursor.num_void)
            cursor.num_fill = 0

    def position_record(self) -> Position:
        """The position at the beginning of a contribution."""
        position, begun_at = self.position, sum(cursor.epoch_at for cursor in self.cursors)
        in_epoch = 0 if self.epoch is None else max(0, position - begun_at)
        return Position(self.progress.position, self.progress.local_steps, position, self.epoch, in_epoch)

    # ---- loops --------------------------------------------------------------------------------

    def add(self, loop: object) -> None:
        """`session.shard()` was called. Positions of several loops are kept with the script's state.

        Raises UsageError after a step without it: that step would count as one of its batches.
        """
        if self._has_run_length and not self.uses_shard:
            message = "session.shard() after a step() without it: it would skip a batch for each such step"
            fix = "take the batches of all steps from session.shard(), or none; leave out a step() without a gradient"
            raise UsageError(message, fix=fix)
        self.uses_shard = True
        if self._waiting:
            self.use()
        self._waiting.add(loop)

    def open(self, loop: object, num_passes: int | None) -> tuple[Cursor, int]:
        """A loop begins. Returns its cursor and its first pass."""
        self.apply_start()
        self._waiting.discard(loop)
        cursor = self._free(loop)
        cursor.loop, cursor.epoch = ref(loop), self.epoch
        if self.epoch is not None:
            first = self.epoch * (num_passes or 1)
            cursor.begins.setdefault(first, cursor.epoch_at)
        else:
            if not cursor.has_ended and cursor.end is not None:  # the script has left the loop before
                cursor.go_to(cursor.end)
            first = cursor.pass_of(cursor.next) if cursor.end_pass is None else cursor.end_pass
            cursor.begins.setdefault(first, cursor.next if cursor.end is None else cursor.end)
        cursor.has_ended = False
        return cursor, first

    def _free(self, loop: object) -> Cursor:
        """The cursor that the loop had, or the first free one."""
        free: list[Cursor] = []
        for cursor in self.cursors:
            owner = None if cursor.loop is None else cursor.loop()
            if owner is loop:
                return cursor
            is_over = cursor.has_ended if self.epoch is None else cursor.epoch != self.epoch
            if owner is None or is_over:
                free.append(cursor)
        if not free:
            free = [Cursor()]
            self.cursors += free
            free[0].move(self._saved()[-1])
        return free[0]

    # ---- the script's own loop over epochs ----------------------------------------------------

    def next_epoch(self) -> None:
        """Begin the next epoch, also if a loop was left before its end."""
        assert self.epoch is not None
        for cursor in self.cursors:
            if cursor.epoch == self.epoch and cursor.end is not None:
                cursor.go_to(cursor.end)
                cursor.epoch_at = cursor.end
            cursor.has_ended = True
        self.epoch += 1

    def use(self) -> None:
        """Send the script's position from now on. Before the first batch, go back to the server's position."""
        if self.is_sent or self.has_begun:
            return
        self.is_sent = True
        if (position := self.beginning()) is not None:
            self.go_back(position)

    def beginning(self) -> Position | None:
        """The position to go back to, or None.

        A new rank may begin in the middle of a training step of several optimizers.
        """
        if (begun := self.strategy.begun()) is not None:
            return begun.position
        row = self.progress.row
        return Position(row.steps - 1, 1, max(0, row.batches - 1)) if row.part else None

    def go_back(self, position: Position) -> None:
        """Begin to compute a contribution again. The cursors are, or go, where it began."""
        log.info("replaying", step=position.step, meaning="this process computes the rank's last step again, unsent")
        self.apply_start()
        if not self.has_in_hand:
            self._move(position.batches)
        begins_at = position.batches - position.epoch_batches if position.epoch is not None else 0
        self.set_first_epoch(position.epoch or 0, begins_at)
        self.strategy.replay(position)

    def set_first_epoch(self, epoch: int = 0, begins_at: int = 0) -> None:
        """Start at this epoch; at the first one if the script's position is unknown."""
        self._first_epoch = epoch, begins_at
        if self.epoch is not None:
            self.start_epochs()

    def start_epochs(self) -> None:
        """Start the script's loop over epochs, or move it back, at the epoch where this process began."""
        self.epoch, begins_at = self._first_epoch
        for cursor, at in zip(self.cursors, self._saved(of_epoch=True), strict=True):
            cursor.epoch, cursor.epoch_at, cursor.has_ended = None, at, True
            cursor.begins.clear()
        self.cursors[0].epoch_at = begins_at - sum(cursor.epoch_at for cursor in self.cursors[1:])

    @property
    def epoch_now(self) -> int:
        """The epoch of the script's loop; without one, the epoch of the next batch."""
        if self.epoch is not None:
            return self.epoch
        return self.position // self.batches_per_epoch if self.batches_per_epoch else self._first_epoch[0]

    def replayed(self) -> None:
        """The replay of the contribution is complete: continue at the run's position."""
        num_missed = self.strategy.replayed()
        if len(self.cursors) == 1 and self.position != self._replay_end:
            self._move(self._replay_end)
        self._num_reported = self.position
        if num_missed:
            message = f"the run took {num_missed} training steps without this rank, so its script's state is older"
            log.warning("state_is_behind", meaning=message)

    @property
    def has_replayed(self) -> bool:
        """Whether steps have used all batches of the replay, or a scaler has skipped them."""
        return self.progress.is_replaying and self.position >= self._replay_end

    @property
    def covers_last_replay(self) -> bool:
        """Whether loops have yielded all batches of a replay that ends the run."""
        in_hand = sum(len(cursor.in_hand) - cursor.num_void for cursor in self.cursors)
        return self.progress.is_replaying and self.progress.is_last and self.position + in_hand >= self._replay_end

    # ---- steps --------------------------------------------------------------------------------

    def begins(self, part: object) -> bool:
        """Whether this step() of one of several optimizers begins a training step.

        It does if a loop over `session.shard()` has yielded a batch since the last training step began. In other loops,
        and for batches that a loop has fetched ahead before its end, each step() of the first optimizer begins one.
        """
        self._first = self._first or part
        if any(not cursor.accumulate for cursor in self.cursors):
            raise UsageError(
                "batches.accumulate = 0 with session.optimizers(): a training step begins with a new batch",
                fix="leave it out: more steps on the same batch, of one optimizer or several, need no word",
            )
        if self.uses_shard and not any(cursor.has_ended and cursor.in_hand for cursor in self.cursors):
            return any(cursor.is_fresh for cursor in self.cursors)
        return part is self._first

    def _due(self) -> list[tuple[Cursor, int]]:
        """The cursors whose batches a step uses now, and how many. Raises UsageError for others than were stated."""
        found = [(cursor, cursor.due()) for cursor in self.cursors if cursor.takes_part]
        if not found and self.uses_shard and any(cursor.accumulate for cursor in self.cursors):
            raise UsageError(
                "step() without a batch of session.shard() since the step before",
                fix="request a batch before each step; batches.accumulate = 0 before a step that uses no new batch",
            )
        return found

    def prepare_step(self, num_stated: int) -> int:
        """Returns the samples of the next step: `num_stated` by the script, else those of its batches.

        Raises UsageError if it uses other batches than were stated, or none and has no samples.
        """
        self._next = self._due()
        if not num_stated and not any(num for _, num in self._next):
            raise UsageError(
                "a step that uses no new batch (batches.accumulate = 0) has no samples, which are its weight",
                fix="session.record(num_samples=...) before it: those of the batch that it computed its gradient from",
            )
        return num_stated or sum(
            [item.num_samples for cursor, num in self._next for item in list(cursor.in_hand)[:num]]
        )

    def num_samples_now(self) -> int:
        """Samples of the batch that the model computes now; 0: it does not come from `session.shard()`."""
        found = [cursor.in_hand[cursor.current].num_samples for cursor in self.cursors if cursor.in_hand]
        return found[0] if found else 0

    def step(self) -> int:
        """Count the prepared training step. Returns its samples; 0 if no batch came from `session.shard()`."""
        if self.uses_shard:
            return sum([cursor.use(num) for cursor, num in self._next])
        if self._num_starts != self.progress.num_starts:
            self.apply_start()
        if not self._has_run_length:
            self.set_run_length(1)
        self.cursors[0].position = self.cursors[0].next = self.cursors[0].position + 1
        return 0

    def skip_step(self) -> None:
        """A step is not taken: its batches are used up, and count for nothing."""
        if self.uses_shard:
            for cursor, num in self._due():
                cursor.use(num)

    def skip(self) -> None:
        """No step will use the batch that the script computes now."""
        for cursor in self.cursors:
            if cursor.takes_part:
                cursor.skip()

    def take_reported(self) -> int:
        """Batches since the last contribution."""
        before, self._num_reported = self._num_reported, self.position
        return max(0, self._num_reported - before)

    # ---- the length of the run ----------------------------------------------------------------

    def set_run_length(self, accumulate: int, num_passes: int | None = 1) -> None:
        """Compute the run's length before the first step, for loops of so many passes.

        Raises UsageError if `run.epochs` is set and the length of an epoch is not known.
        """
        if self._has_run_length:
            return
        self._has_run_length = True
        length, progress = self.length, self.progress
        if length.epochs is not None and not self.batches_per_epoch:
            raise UsageError(
                f"run.epochs is {length.epochs}, and the length of an epoch of this script's own loader is not known",
                fix="--steps N instead, or loop over session.shard(dataset)",
            )
        if found := length.of_run(self.batches_per_epoch, accumulate, num_passes):
            self.run_steps = found
            if progress.total_steps is None:
                progress.limit(found)
        of_loop, total = length.of_loop(self.batches_per_epoch, accumulate), progress.total_steps
        if of_loop is not None and total is not None and of_loop > total:
            setting = "run.steps" if length.epochs is None else f"run.epochs: {length.epochs}"
            message = f"the run ends after {total} training steps ({setting}); this script's loop has {of_loop}"
            log.warning("cut_short", reason=message, fix=f"--steps {of_loop}; without --steps the loop sets the length")
