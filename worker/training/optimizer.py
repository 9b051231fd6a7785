"""The optimizer a training loop steps: behind `step()` lies whatever the run's mode needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...common.errors import UsageError
from ...common.reporting.log import get_logger
from ...common.tensors.optimizers import Hyperparameters, current_hyperparameters
from ..conversation.messages import RowGradients, Work
from ..session import Length, Progress
from ..strategies.direct import Direct
from .batches import digest_of
from .evaluation import Evaluation
from .place.memory import Memory
from .place.taken import Taken
from .rows import Rows, refuse_scaler
from .slowdown import Slowdown

log = get_logger()

_PLACE = "paramserver"  # in a saved state: where the rest of it is


class ExchangeOptimizer(torch.optim.Optimizer):
    """Stands in for the optimizer it is made from, and shares its parameter groups and state, so schedulers work on it
    as on any other: the current hyperparameters go with every contribution. Where gradients are contributed the server
    steps; where weights are, the given optimizer does, here.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        strategy: Direct,
        slowdown: Slowdown,
        length: Length | None = None,
        tables: Sequence[Rows] = (),
        evaluation: Evaluation | None = None,
    ) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self._strategy = strategy
        self._slowdown = slowdown
        self._tables = tables
        self.inner = inner  # where the server steps, without state
        self._steps_here = strategy.source == "weights"  # otherwise the server steps
        self._share()
        inner.register_load_state_dict_post_hook(lambda _: self._share())
        inner.register_step_pre_hook(self._before_inner_step)
        self._is_stepping = False
        self._last_values: list[list[Any]] = []
        self._hyperparameters: list[Hyperparameters] = []
        self.taken = Taken(lambda: strategy.progress, inner, length or Length())
        self.memory = Memory(strategy, self.taken, inner)
        self._evaluation = evaluation or Evaluation()
        self._num_batches = 0
        self._told_at = -1
        self._num_samples = 0
        self._losses: list[float] = []
        self._num_steps = strategy.progress.training_steps
        self._resumed_at = time.perf_counter()
        self._compute_s = 0.0

    def _share(self) -> None:
        """The same dicts, not copies: what a scheduler changes here, the inner optimizer sees."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _before_inner_step(self, *_: Any) -> None:
        if not self._is_stepping:
            raise UsageError(
                "step() of the optimizer that session.optimizer() was given: the run would never hear of it",
                fix="step the one it returned: optimizer = session.optimizer(model, optimizer)",
            )

    def state_dict(self) -> dict[str, Any]:
        """As torch's, for torch to load. Where the server steps, what its optimizer remembers is fetched, as of its
        newest version. UnreachableError."""
        found: dict[str, Any] = super().state_dict()
        if not self._steps_here:
            parameters = [one for group in self.param_groups for one in group["params"]]
            found["state"] = self._strategy.optimizer_state(parameters)
            found[_PLACE] = {"run": self.progress.run, "steps": self.progress.position}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. Where the server steps, hyperparameters only; a warning says when that loses anything: the
        server's moments are those of its own steps."""
        if not self._steps_here:
            here = {"run": self.progress.run, "steps": self.progress.position}
            if state_dict["state"] and state_dict.get(_PLACE) != here:
                log.warning(
                    "optimizer_state_not_loaded",
                    meaning="hyperparameters are taken; moments are the server's and stay as they are: in a new run "
                    "they begin anew, with ps-server --checkpoint-dir it goes on with them",
                )
            state_dict = {**state_dict, "state": {}}
        self.inner.load_state_dict(state_dict)

    @property
    def progress(self) -> Progress:
        return self._strategy.progress

    def record(self, num_samples: int = 0, loss: float | None = None) -> None:
        """Count samples, and a loss to show, towards the next contribution."""
        self._num_samples += num_samples
        if loss is not None:
            self._losses.append(loss)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One training step. Blocks while the run's mode makes this worker wait (pipelined: for the step before).

        Raises the errors of `common/errors.py`, e.g. UnreachableError when the server is gone for good.
        """
        if self.progress.is_done and self.taken.drop():
            return closure() if closure is not None else None
        if self.progress.is_done:
            raise UsageError(
                f"step() after the end of the run, which has {self.progress.total_steps} training steps (run.steps)",
                fix="end the loop when session.is_done, or loop over session.shard(...); or give the run as many steps "
                "as the loop takes (--steps)",
            )
        self.memory.note()
        self._evaluation.begin(self.progress, self.taken)
        loss = self._step(closure)
        self._num_steps += 1
        num_batches, weight = self.taken.step()
        self._num_batches, self._num_samples = self._num_batches + num_batches, self._num_samples + weight
        self._slow_down()
        if self.progress.took_step():
            if self.progress.is_replaying:
                self.memory.replayed()
                self._evaluation.is_due(self.progress, self.taken)  # what was due then is over
                self._begin_anew()
            else:
                self._contribute()
        self._resumed_at = time.perf_counter()
        return loss

    def _contribute(self) -> None:
        mean_loss = sum(self._losses) / len(self._losses) if self._losses else float("nan")
        work = Work(self._num_samples, mean_loss, self._compute_s, self._current_hyperparameters())
        drawn = self._num_batches if self.taken.is_used else None
        is_due = self._evaluation.is_due(self.progress, self.taken)
        work = work._replace(num_batches=drawn, data=self._data(), began=self.memory.take(), rows=self._rows())
        self._strategy.contribute(work._replace(evaluates=is_due))
        self._begin_anew()
        self.memory.after_step()
        if is_due and not self.progress.is_done:  # at the end the final weights are evaluated
            self._evaluation.run()

    def _begin_anew(self) -> None:
        self._num_batches, self._num_samples, self._losses, self._compute_s = 0, 0, [], 0.0
        for table in self._tables:
            table.drop()

    def finish(self) -> None:
        """No more training steps are to come: local ones that nobody has heard of are contributed."""
        if self.progress.is_replaying:
            self.memory.replayed()
        if self.progress.cut_short():
            self._contribute()

    def _rows(self) -> tuple[RowGradients, ...]:
        """What the steps of this contribution have for the tables."""
        found = [(number, table.take()) for number, table in enumerate(self._tables)]
        return tuple(RowGradients(number, *taken) for number, taken in found if taken is not None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for table in self._tables:
            table.drop()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return refuse_scaler(self._tables)

    def _data(self) -> tuple[int, int, int] | None:
        """What the first contribution says of the data; again after each start, for a server that has forgotten it."""
        if self._told_at == self.progress.num_starts:
            return None
        self._told_at = self.progress.num_starts
        parameters = [one for group in self.param_groups for one in group["params"]]
        sent = parameters if self._steps_here else [one.grad for one in parameters if one.grad is not None]
        return self.taken.num_samples, digest_of(sent), self.taken.run_steps

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """What of a step is done here; returns the closure's loss."""
        if self._steps_here:
            self._is_stepping = True
            try:
                return self.inner.step(closure)
            finally:
                self._is_stepping = False
        self.inner._opt_called = True  # type: ignore[attr-defined]  # a scheduler made for it asks
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def _current_hyperparameters(self) -> list[Hyperparameters]:
        """Of every group; worked out anew only when a value has changed, which schedulers do now and then."""
        values = [[_as_number(value) for key, value in group.items() if key != "params"] for group in self.param_groups]
        if values != self._last_values:
            self._last_values = values
            self._hyperparameters = [current_hyperparameters(group) for group in self.param_groups]
        return self._hyperparameters

    def _slow_down(self) -> None:
        """Add the configured delay, and count the whole step as compute."""
        delay_s = self._slowdown.delay_s(self._num_steps, time.perf_counter() - self._resumed_at)
        if delay_s > 0:
            time.sleep(delay_s)
        self._compute_s += time.perf_counter() - self._resumed_at

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_strategy"):
            raise UsageError(
                "the run's parameter groups are fixed once session.optimizer() has been called",
                fix="add the group to the optimizer before (its parameters may stay without gradients until later)",
            )
        super().add_param_group(param_group)


def _as_number(value: Any) -> Any:
    """A learning rate may be a tensor that a scheduler fills in place."""
    return value.tolist() if isinstance(value, torch.Tensor) else value
