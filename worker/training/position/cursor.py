"""The position of one loop over `session.shard()`: which batches it yielded, and which of them steps have used. Pure.

    yielded(a)  yielded(b)  step       yielded(c)   move(...)        step               yielded(p)
    in hand: a  a b         b          b c          b c (both void)  c, uses b: void    c p

A step uses exactly `accumulate` batches, in the order in which they were yielded. At most `prefetch` newer ones may be
in hand then. When the run moves (the server went back, or went on without this rank), the batches in hand are void: the
steps that use them contribute nothing. If a void step would also use newer batches, these are fillers, and the loop
yields them again.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple
from weakref import ReferenceType

from ....common.errors import UsageError


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
        if num < self.accumulate:
            fix = f"session.shard(..., accumulate={max(1, num)}), or batches.accumulate = {num} before this step"
        else:
            fix = (
                f"accumulate={num - self.prefetch} if a step uses several batches; prefetch={num - self.accumulate} if "
                "the loop fetches ahead; session.skip() for each batch that no step uses (of two loops in zip(), the "
                "shorter one comes first); a DataLoader for data that is not trained on"
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
