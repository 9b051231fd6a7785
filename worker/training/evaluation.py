"""A script's evaluations during the run: when one is due, and how to run it without an effect on training."""

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
from .position.data import DataPosition
from .position.memory import Generators
from .readings import number_of

log = get_logger()

Measure = Callable[[nn.Module], Mapping[str, float]]


class Evaluation:
    """The evaluations of one worker. None is due before `set`.

    `wanted`: the run's own interval, which overrides the script's. `is_needed`: the run may end by a metric
    (run.stop_when, run.patience).
    """

    _measure: Measure  # set by `set`, as `every` is

    def __init__(self, wanted: str | None = None, is_needed: bool = False) -> None:
        self.run: Callable[[], None] = lambda: None  # evaluates; set by the session
        self.is_final_too = True  # the function also evaluates the final weights
        self._wanted = wanted
        self.every: Every | None = None
        self._began_at = time.monotonic()
        self._num_over: int | None = None  # intervals that had passed at the last check
        self.is_missing = bool(wanted or is_needed)  # the run wants evaluations, and the script has not set them

    def set(self, measure: Measure, how_often: str | int | None) -> None:
        """Set the function and the interval. Raises UsageError for an invalid interval."""
        try:
            self.every = every(str(self._wanted or how_often or "1epoch"))
        except ValueError as error:
            raise UsageError(f"session.evaluate(): {error}", fix="every=100, every='30s' or every='1epoch'") from None
        self._measure, self.is_missing = measure, False

    def say_missing(self) -> None:
        """Warn once that the script does not evaluate."""
        self.is_missing = False
        setting = "run.eval_every" if self._wanted else "run.stop_when or run.patience"
        fix = "session.evaluate(fn), fn(model) giving a dict of metrics"
        log.warning("not_evaluated", reason=f"{setting} is set, and this script does not evaluate", fix=fix)

    def begin(self, progress: Progress, data: DataPosition) -> None:
        """Called before a step. Intervals that passed before the first step are not due."""
        if self._num_over is None:
            self._num_over = self._over(progress, data)

    def is_due(self, progress: Progress, data: DataPosition) -> bool:
        """Called after a step. Returns whether an interval has passed since the last call and this worker evaluates."""
        over = self._over(progress, data)
        is_due = self._num_over is not None and over > self._num_over
        self._num_over = over  # smaller than before if the run went back
        return is_due and progress.is_asked

    def _over(self, progress: Progress, data: DataPosition) -> int:
        """The number of intervals that have passed."""
        assert self.every is not None
        match self.every.unit:
            case "steps":
                return int(progress.position // self.every.amount)
            case "seconds":
                return int((time.monotonic() - self._began_at) // self.every.amount)
        if data.batches_per_epoch:
            return int(data.position // (self.every.amount * data.batches_per_epoch))
        if progress.position == 0:
            return 0

        raise UsageError(
            "session.evaluate() is to run each epoch, and the length of an epoch of this script's loader is not known",
            fix="session.evaluate(fn, every=100) for every 100 steps, or loop over session.shard(dataset)",
        )

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """Evaluate the model as it is. Returns the metrics by name."""
        with untouched(model), torch.no_grad():
            found: Any = self._measure(model)
        if not isinstance(found, Mapping):
            message = f"the function of session.evaluate() returned {type(found).__name__}, not a dict of metrics"
            raise UsageError(message, fix="return {'loss': ..., 'accuracy': ...}")
        return {str(name): number_of(value, f"{name} of session.evaluate()") for name, value in found.items()}


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode inside; restore its mode, its buffers and the random generators afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    named = [(module, *item) for module in model.modules() for item in module.named_buffers(recurse=False)]
    buffers = [(module, name, buffer, buffer.clone()) for module, name, buffer in named]
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
            for module, name, buffer, before in buffers:
                if getattr(module, name) is not buffer:  # the evaluation has assigned another tensor
                    setattr(module, name, buffer)
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
