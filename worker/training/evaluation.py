"""A script's evaluation while the run goes on: when it is due, and that it leaves no trace in the training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...common.config.conditions import Every, every
from ...common.errors import UsageError
from ...common.reporting.log import get_logger
from ..session import Progress
from .position.memory import Generators
from .position.taken import Taken

log = get_logger()

Measure = Callable[[nn.Module], Mapping[str, float]]


class Evaluation:
    """Of one worker. Until it is `set` nothing is due. `wanted`: how often the run says, which overrules the script;
    `is_needed`: the run's end may hang on it."""

    def __init__(self, wanted: str | None = None, is_needed: bool = False) -> None:
        self.run: Callable[[], None] = lambda: None  # evaluates: the session's
        self.is_final_too = True  # the final weights are evaluated so as well
        self._wanted = wanted
        self._measure: Measure | None = None
        self.every: Every | None = None  # once it is `set`
        self._began_at = time.monotonic()
        self._num_over: int | None = None  # intervals that were over when it was looked last
        self._is_told = not (wanted or is_needed)

    def set(self, measure: Measure, how_often: str | int | None) -> None:
        """UsageError for an interval that is none."""
        try:
            self.every = every(str(self._wanted or how_often or "1epoch"))
        except ValueError as error:
            raise UsageError(f"session.evaluate(): {error}", fix="every=100, every='30s' or every='1epoch'") from None
        self._measure = measure

    @property
    def comes_last(self) -> bool:
        """The final weights are to be evaluated as those before."""
        return self._measure is not None and self.is_final_too

    def begin(self, progress: Progress, taken: Taken) -> None:
        """Before a step: what is behind it is not due any more."""
        if self._num_over is None and self._measure is not None:
            self._num_over = self._over(progress, taken)

    def is_due(self, progress: Progress, taken: Taken) -> bool:
        """After a step: an interval is over since it was asked last, and this worker is the one that evaluates."""
        if self._measure is None:
            if not self._is_told:
                self._is_told = True
                setting = "run.eval_every" if self._wanted else "run.stop_when or run.patience"
                fix = "session.evaluate(fn), fn(model) giving a dict of metrics"
                log.warning("not_evaluated", reason=f"{setting} is set, and this script does not evaluate", fix=fix)
            return False
        over = self._over(progress, taken)
        is_due = self._num_over is not None and over > self._num_over
        self._num_over = over  # it may have gone back
        return is_due and not progress.worker_index and not progress.has_evaluator

    def _over(self, progress: Progress, taken: Taken) -> int:
        """Intervals that are over."""
        assert self.every is not None
        match self.every.unit:
            case "steps":
                return int(progress.position // self.every.amount)
            case "seconds":
                return int((time.monotonic() - self._began_at) // self.every.amount)
        if taken.epoch_batches:
            return int(taken.position // (self.every.amount * taken.epoch_batches))
        if progress.position == 0:
            return 0
        raise UsageError(
            "an evaluation each epoch, and how long an epoch of this script's own loader is nobody knows",
            fix="session.evaluate(fn, every=100) for every 100 steps, or loop over session.shard(dataset)",
        )

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """Of the model as it is."""
        assert self._measure is not None
        with untouched(model), torch.no_grad():
            found: Any = self._measure(model)
        if not isinstance(found, Mapping):
            message = f"the function of session.evaluate() returned {type(found).__name__}, not a dict of metrics"
            raise UsageError(message, fix="return {'loss': ..., 'accuracy': ...}")
        return {str(name): float(value) for name, value in found.items()}


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; modes, buffers and generators are as they were afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    generators = Generators()
    drawn = generators.state_dict()
    model.eval()
    try:
        yield
    finally:
        generators.load_state_dict(drawn)
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
