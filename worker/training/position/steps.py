"""Training steps as a loop takes them, with one optimizer or several, and the contributions they make."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ....common.errors import UsageError
from ....common.tensors.optimizers import Hyperparameters
from ....common.wire.records import Contribution, Counts, FirstInfo, Timing, TrainingInfo
from ...conversation.messages import Begun, Outgoing, RowGradients
from ...session import Progress
from ...strategies.base import Strategy
from ..batches import digest_of
from ..evaluation import Evaluation
from ..rows import Rows
from ..slowdown import Slowdown
from .memory import Memory
from .restarted import Restarted, rates_of
from .taken import Taken


class Part(Protocol):
    """One of the optimizers."""

    @property
    def parameters(self) -> list[torch.Tensor]: ...

    def hyperparameters(self) -> list[Hyperparameters]:
        """Of each group."""

    def take_clip_norm(self) -> float:
        """2-norm that this step is along at most, as the script has said since the step before; 0: any."""


class Turns:
    """Which step() of several optimizers begins a training step, and which belongs to the one before.

    A training step is a batch: of a loop over `session.shard()` the first step() after a batch was asked for begins
    one. Where batches come from elsewhere, or are asked for ahead, it is each step() of the optimizer stepped first.
    """

    def __init__(self, taken: Taken) -> None:
        self._taken = taken
        self._first: object = None

    def begins(self, part: object) -> bool:
        if not self._taken.is_parted:
            return True
        self._first = self._first or part
        if self._taken.tells_steps:
            return self._taken.has_drawn
        return part is self._first


def after_the_end(progress: Progress) -> UsageError:
    return UsageError(
        f"step() after the end of the run, which has {progress.total_steps} training steps (run.steps)",
        fix="end the loop when session.is_done, or loop over session.shard(...); or give the run as many steps "
        "as the loop takes (--steps)",
    )


class Steps:
    """Of all optimizers of a session; `parts` has them."""

    def __init__(
        self,
        strategy: Strategy,
        slowdown: Slowdown,
        taken: Taken,
        memory: Memory,
        tables: Sequence[Rows] = (),
        evaluation: Evaluation | None = None,
        restarted: Restarted | None = None,
    ) -> None:
        self.strategy, self.taken, self.memory, self._slowdown = strategy, taken, memory, slowdown
        self.tables, self._evaluation = tables, evaluation or Evaluation()
        self._restarted = restarted or Restarted()
        self._first_rates: tuple[float, ...] | None = None  # at the first training step of this process
        self.parts: list[Part] = []
        self.notice: Callable[[], bool] | None = None  # asked after each step until it says that it is done
        self.num_steps = strategy.progress.training_steps
        self._turns = Turns(taken)
        self._begins = True  # the step() that is under way: a training step
        self._newest: Part | None = None  # that began one
        self._began: Begun | None = None  # its contribution
        self._num_starts = -1
        self._num_known = 0  # contributions that count already, of the training step that is computed once more
        self._is_stale = False  # what is stepped belongs to a training step of before the run moved
        self._num_batches = self._num_samples = 0
        self._step_samples = 0  # of the newest training step
        self._losses: list[float] = []
        self._fresh_samples, self._fresh_losses = 0, list[float]()  # recorded since the last step
        self._hyperparameters: tuple[Hyperparameters, ...] = ()
        self._told_at = self._digested_at = -1  # by `num_starts`
        self._digest = 0  # of the gradients of the first step after the newest start
        self._resumed_at = time.perf_counter()
        self._compute_s = 0.0
        if taken.is_parted:  # a process that comes into the middle of a training step does the rest of it
            memory.use()

    @property
    def progress(self) -> Progress:
        return self.strategy.progress

    @property
    def has_stepped(self) -> bool:
        """In this process."""
        return self._newest is not None

    def record(self, num_samples: int = 0, loss: float | None = None) -> None:
        """Count samples, and a loss to show, towards the next contribution."""
        self._num_samples += num_samples
        self._fresh_samples += num_samples
        if loss is not None:
            self._losses.append(loss)
            self._fresh_losses.append(loss)

    def may_step(self, part: Part) -> bool:
        """Before a step(); False when there is nothing to do. UsageError after the end of the run."""
        progress = self.progress
        self._begins = self._turns.begins(part)
        if self._num_starts != progress.num_starts:
            self._num_starts, self._num_known = progress.num_starts, max(1, progress.in_step)
            self._is_stale = progress.in_step > 0
        self._is_stale &= not self._begins
        if self._is_stale:
            return False
        if self._begins and progress.is_done:
            if self.taken.drop():
                return False
            raise after_the_end(progress)
        if self._begins:
            self._restarted.look(progress)
            if self._first_rates is None:
                self._first_rates = rates_of(self._restarted.optimizers)
            self.memory.is_tried = False
            self.memory.note()
            self._evaluation.begin(progress, self.taken)
        num_samples = self.taken.num_samples_at_hand if self._begins else 0
        losses, self._fresh_losses = self._fresh_losses, []
        mean_loss = sum(losses) / len(losses) if losses else float("nan")
        self.strategy.before_step(num_samples + self._fresh_samples, mean_loss, part.parameters)
        self._fresh_samples = 0
        return True

    def stepped(self, part: Part) -> None:
        """What of a step() is done here is done: contribute when it is time to."""
        if self._begins:
            self._newest = part
            self._note_gradients(part)
            self.num_steps += 1
            num_batches, num_samples = self.taken.step()
            self._num_batches, self._num_samples = self._num_batches + num_batches, self._num_samples + num_samples
        if self.notice is not None and self.notice():
            self.notice = None
        self._slow_down()
        if self._is_due():
            if not self.progress.is_replaying:
                self._contribute(part)
            else:
                self._num_known -= 1
                if not self._num_known:
                    self.memory.replayed()
                    self._evaluation.is_due(self.progress, self.taken)  # what was due then is over
                self._begin_anew()
        elif self._begins:
            self.strategy.went_on()
        self._resumed_at = time.perf_counter()

    def _is_due(self) -> bool:
        if self._begins:
            return self.progress.took_step()
        # In localsgd other optimizers' steps go with the next training step; after the last one there is none.
        return not self.strategy.kind.worker_steps or self.progress.is_last

    def _contribute(self, part: Part) -> None:
        mean_loss = sum(self._losses) / len(self._losses) if self._losses else float("nan")
        num_samples = self._num_samples if self._begins else self._num_samples or self._step_samples
        if self.taken.is_used:
            num_samples = max(1, num_samples)  # 0, as of a batch whose gradient was thrown away, is for nobody said
        hyperparameters = self._current_hyperparameters()
        if self._begins:
            self._began = self.memory.take()
        drawn = self._num_batches if self.taken.is_used else None
        is_due = self._begins and self._evaluation.is_due(self.progress, self.taken)
        if self._begins and self._evaluation.every is not None:
            is_due = self.strategy.agreed(is_due)
        number = self.parts.index(part) + 1 if self.taken.is_parted else 0
        num_steps = 0 if number and not self._begins else None  # of the training step of the part before
        clip_norm, began = part.take_clip_norm(), self._began
        contribution = Contribution(
            kind=self.strategy.kind,
            counts=Counts(num_samples, num_steps, drawn, number),
            timing=Timing(self._compute_s),
            training=TrainingInfo(hyperparameters, clip_norm, mean_loss, evaluates=is_due),
            first=self._first(),
            position=began.position if began is not None else None,
        )
        outgoing = Outgoing(contribution, began.payload if began is not None else None, self._rows())
        self.strategy.contribute(outgoing, part.parameters if number else None)
        self._begin_anew()
        self.memory.after_step()
        if is_due and not self.progress.is_done:  # at the end the final weights are evaluated
            self._evaluation.run()

    def _rows(self) -> tuple[RowGradients, ...]:
        """What the steps of this contribution have for the tables."""
        found = [(number, table.take()) for number, table in enumerate(self.tables)]
        return tuple(RowGradients(number, *taken) for number, taken in found if taken is not None)

    def _begin_anew(self) -> None:
        if self._begins:
            self._step_samples = self._num_samples
        self._num_batches, self._num_samples, self._losses, self._compute_s = 0, 0, [], 0.0
        for table in self.tables:
            table.drop()

    def finish(self) -> None:
        """No more training steps are to come: local ones that nobody has heard of are contributed."""
        if self.progress.is_replaying:
            self.memory.replayed()
        if self._newest is not None and self.strategy.kind.worker_steps and self.progress.cut_short():
            self._begins = True
            self._contribute(self._newest)

    def _current_hyperparameters(self) -> tuple[Hyperparameters, ...]:
        """Of all groups, then of all tables; the same tuple while nothing has changed."""
        found = [group for part in self.parts for group in part.hyperparameters()]
        found += [{} if table.lr is None else {"lr": float(table.lr)} for table in self.tables]
        if found != list(self._hyperparameters):
            self._hyperparameters = tuple(found)
        return self._hyperparameters

    def _first(self) -> FirstInfo | None:
        """What the first contribution says of the data; again after each start, for a server that has forgotten it."""
        if self._told_at == self.progress.num_starts:
            return None
        self._told_at = self.progress.num_starts
        return FirstInfo(self.taken.num_samples, self._digest, self.taken.run_steps, self._first_rates or ())

    def _note_gradients(self, part: Part) -> None:
        """Of the first step after a start. Batches that `session.shard()` divides need no comparison."""
        if self._digested_at == self.progress.num_starts or self.progress.is_replaying:
            return
        self._digested_at = self.progress.num_starts
        gradients = [parameter.grad for parameter in part.parameters if parameter.grad is not None]
        self._digest = 0 if self.taken.is_used else digest_of(gradients)

    def _slow_down(self) -> None:
        """Add the configured delay, and count the whole step as compute."""
        delay_s = self._slowdown.delay_s(self.num_steps, time.perf_counter() - self._resumed_at)
        if delay_s > 0:
            time.sleep(delay_s)
        self._compute_s += time.perf_counter() - self._resumed_at
