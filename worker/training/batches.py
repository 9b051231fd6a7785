"""What `session.shard()` gives: this rank's batches until the run is over, and which of them a step was made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import Any, Protocol
from weakref import WeakSet

import torch

from ...common.errors import UsageError
from ...common.reporting.log import get_logger
from ..session import Length, Place, Progress
from .data import Shares, epoch_batches, sharded_batches, step_seed

log = get_logger()

_NUM_DIGESTED = 64  # elements of each tensor


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
        self.weights: deque[int] = deque()
        self.num_computed = 0  # backward passes since the last step
        self.is_ahead = is_ahead  # whether batches are asked for before the one at hand is used

    def __len__(self) -> int:
        return len(self.weights)

    def computed(self) -> None:
        """A backward pass is done."""
        if self.is_ahead is None and self.weights:
            self.is_ahead = len(self.weights) > 1
        self.num_computed += 1

    def drop(self) -> bool:
        had_any = bool(self.weights)
        self.weights.clear()
        return had_any

    def take(self) -> tuple[int, int]:
        """What the step just taken was made of: all that was drawn, or, of a loop that asks ahead, as much as there
        were backward passes."""
        num = min(len(self.weights), self.num_computed) if self.is_ahead else len(self.weights)
        self.num_computed = 0
        return num, sum(self.weights.popleft() for _ in range(num))


class Taken:
    """Batches that have gone into steps, of all loops over `session.shard()`: where this rank is in its data."""

    def __init__(self, progress: Callable[[], Progress], optimizer: torch.optim.Optimizer, length: Length) -> None:
        self._progress, self._optimizer, self.length = progress, optimizer, length
        self.epoch_batches = 0  # of this rank
        self.run_steps = 0  # of the run, where this worker has found them out
        self._has_compared = False
        self._loops: WeakSet[Batches] = WeakSet()
        self._left: list[Hand] = []  # what loops over an epoch had in hand when it ended
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
    def place(self) -> int:
        """Batches of this rank that are behind it."""
        self._follow()
        return self._begins_at + self._num_taken

    def _follow(self) -> None:
        """What was taken before the run said where to start is forgotten."""
        progress = self._progress()
        if self._num_starts != progress.num_starts:
            self._num_starts = progress.num_starts
            self._go(progress.batches)

    def _go(self, place: int) -> None:
        self._begins_at, self._num_taken = place, 0
        self._num_moves += 1
        self._left.clear()

    @property
    def moves(self) -> int:
        """How often batches have been to be taken from elsewhere than after the last one."""
        self._follow()
        return self._num_moves

    @property
    def asked(self) -> int:
        """Batches of the epoch that are behind this rank, and those of loops that have ended."""
        return self.place - self._epoch_at + sum(map(len, self._left))

    def where(self, step: int, local_steps: int) -> Place:
        """This rank's place in the data, at the beginning of a contribution."""
        if self.epoch is None:
            return Place(step, local_steps, self.place)
        return Place(step, local_steps, self.place, self.epoch, max(0, self.place - self._epoch_at))

    # ---- the script's own loop over epochs ----------------------------------------------------

    def next_epoch(self) -> None:
        """What loops have in hand still belongs to the next step."""
        assert self.epoch is not None
        for loop in self._loops:
            loop.end()
        length = self.epoch_length or self.asked  # before where the run began there are epochs without a batch
        self._epoch_at += min(self.asked, length)
        self.epoch, self.epoch_length = self.epoch + 1, 0

    def leave(self, hand: Hand) -> None:
        if hand:
            self._left.append(hand)

    # ---- going back, and on -------------------------------------------------------------------

    def go_back(self, place: Place) -> None:
        """A contribution that began there is to be computed once more."""
        self._ends_at = self.place
        self._go(place.batches)
        self._stand_in(place.epoch or 0, place.batches - place.epoch_batches if place.epoch is not None else 0)

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
        return self.place // self.epoch_batches if self.epoch_batches else self._came[0]

    def go_on(self) -> None:
        """It has been computed; what comes next is where the run said."""
        if self.place != self._ends_at:
            self._go(self._ends_at)

    def is_through(self, hand: Hand) -> bool:
        """All batches of what is computed once more have been used and no step was taken: a scaler found infinities."""
        is_replaying = self._progress().is_replaying
        num_asked = sum(map(len, (*self._left, hand)))
        return is_replaying and 0 < len(hand) <= hand.num_computed and self.place + num_asked >= self._ends_at

    # ---- steps --------------------------------------------------------------------------------

    def add(self, loop: Batches) -> None:
        if not self.is_used:
            parameters = [one for group in self._optimizer.param_groups for one in group["params"] if one.requires_grad]
            parameters[-1].register_post_accumulate_grad_hook(self._computed)
        self.is_used = True
        self._loops.add(loop)

    def _computed(self, _: torch.Tensor) -> None:
        for loop in self._loops:
            loop.hand.computed()
        for hand in self._left:
            hand.computed()

    def step(self) -> tuple[int, int]:
        """A training step is done: (batches, what they weigh) that it was made of; zeros when none came from here."""
        self._follow()
        ended = [hand.take() for hand in self._left]
        self._left = [hand for hand in self._left if hand]
        found = [loop.hand.take() for loop in self._loops]
        # Two loops side by side draw at the same place.
        num_batches = sum(num for num, _ in ended) + max((num for num, _ in found), default=0)
        self._num_taken += num_batches if self.is_used else 1
        self.per_step = max(1, num_batches)
        self._measure(self._progress())
        return num_batches, sum(weight for _, weight in (*ended, *found))

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
        hands = [*self._left, *(loop.hand for loop in self._loops)]
        return sum(hand.drop() for hand in hands) > 0  # each of them drops


class Batches:
    """An iterator with a length. What it gives belongs to a step only when the step is taken: a loop may ask for
    batches before it uses them, as trainers do. In a loop over `session.epochs()` it ends with the epoch, and may be
    iterated again in the next."""

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
        self.hand = Hand()
        self._is_of: tuple[int, int | None] | None = None  # moves and epoch that `_batches` is of
        self._batches: Iterator[tuple[Any, int]] = iter(())
        taken.epoch_batches = self._epoch_length  # says at once what cannot be
        self._end = self._end_of_loop()
        taken.add(self)
        taken.num_samples = len(shares.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Batches:
        if self._end is not None and self._at >= self._end:
            self._end = self._end_of_loop()
        return self

    def __len__(self) -> int:
        """Batches left for this rank in the loop; of several to a step, as many as the newest step had."""
        if self._taken.epoch is not None:
            return max(0, self._epoch_length - self._taken.asked - len(self.hand))
        left = [] if self._end is None else [self._end - self._at]
        if (num_in_run := self._num_in_run) is not None:
            left.append(num_in_run)
        if not left:  # run.epochs: before the first step
            left.append((self._taken.length.epochs or 0) * self._taken.epoch_batches - self._at)
        return max(0, min(left))

    @property
    def _num_in_run(self) -> int | None:
        """Batches that training steps of the run are still to be made of."""
        steps = self._num_left
        return None if steps is None else steps * max(1, self._taken.per_step) - len(self.hand)

    @property
    def _num_left(self) -> int | None:
        """Training steps of the run that are to be taken; None where it has no number of them, or not yet."""
        total, progress = self._progress().total_steps, self._progress()
        return None if total is None else max(0, total - progress.position)

    @property
    def _at(self) -> int:
        """Batches of this rank that are behind it, or asked for."""
        return self._taken.place + len(self.hand)

    @property
    def _has_ended(self) -> bool:
        return self._taken.epoch is None and self._end is not None and self._at >= self._end

    def _end_of_loop(self) -> int | None:
        """So many batches are behind this rank when the loop ends; None: the end of the run is."""
        each, progress = self._taken.epoch_batches, self._progress()
        if progress.total_steps is not None or not self._taken.length.is_open:
            return None
        return each * (self._at // each + 1 if self._epochs is None else self._epochs)

    @property
    def _epoch_length(self) -> int:
        return self._shares.num_batches(self._division[0])

    def __next__(self) -> Any:
        taken, memory = self._taken, self._taken.memory
        if memory is not None and taken.is_through(self.hand):
            self.hand.drop()
            memory.replayed()
        if self._has_all or self._has_ended or self._is_over():
            raise StopIteration
        if memory is not None and memory.has_moved:
            if taken.epoch is not None:
                raise StopIteration  # the loop over epochs goes back
            memory.move()
        if self._is_of != (taken.moves, taken.epoch):  # at first, and when the run has moved without this worker
            self._begin()
        if taken.epoch is not None and not len(self):
            self.end()
            raise StopIteration
        if memory is not None:
            memory.note()
        place = taken.place + len(self.hand)
        torch.manual_seed(step_seed(self._shares.seed, self._progress().rank or 0, place))
        batch, weight = next(self._batches)
        self.hand.weights.append(weight)
        return batch

    def _begin(self) -> None:
        """From this rank's place on."""
        taken = self._taken
        if self._is_of is None or self._is_of[0] != taken.moves:
            self.hand.drop()
        self._is_of = taken.moves, taken.epoch
        if taken.epoch is None:
            self._batches = sharded_batches(self._shares, lambda: self._division, taken.place, **self._options)
            return
        taken.epoch_length = max(taken.epoch_length, self._epoch_length)
        self._batches = epoch_batches(self._shares, taken.epoch, self._division, taken.asked, **self._options)

    def end(self) -> None:
        """Of the epoch."""
        self._taken.leave(self.hand)
        self.hand = Hand(self.hand.is_ahead)

    @property
    def weight(self) -> int:
        """Of the batch given last: its samples, as they count in a mean."""
        return self.hand.weights[-1]

    def void(self) -> None:
        """What was asked for since the last step weighs nothing: its gradient was thrown away."""
        self.hand.weights = deque([0] * len(self.hand))

    @property
    def _division(self) -> tuple[int, int]:
        progress = self._progress()
        return max(1, progress.num_workers), progress.worker_index

    @property
    def _has_all(self) -> bool:
        """A loop that asks ahead has what its last steps need: these are still to be taken, so it must not wait."""
        return bool(self.hand.is_ahead and self._taken.per_step and self._num_left and (self._num_in_run or 0) <= 0)


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
