"""A process that only evaluates a run while its workers train, with a task (`ps-worker --evaluate`) or a script."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ....common.config.conditions import Every, every
from ....common.errors import UsageError
from ....common.reporting.log import get_logger
from ....common.tensors.optimizers import Reduction, check_max_norm
from ....common.user_code import user_code
from ...conversation.evaluator import Evaluator
from ...conversation.threads import sleep
from ...session import Progress
from ...strategies.base import Strategy
from ...tasks.base import Task
from ...tensors.transfer import ModelTensors
from ..ending import Ending, ending_of
from ..evaluation import untouched
from ..optimizer import parameters_of
from ..position.data import DataPosition
from ..position.memory import Memory
from ..session import Session

log = get_logger()

_LOOK_S = 0.1


def evaluate_for(evaluator: Evaluator, task: Task, device: torch.device, how_often: str | None) -> None:
    """Evaluate a task until the run is over.

    `how_often`: the interval in steps of the slowest worker, seconds or epochs. If it is None, the run's settings give
    the interval; the default is one epoch.
    """
    settings, interval = evaluator.settings, every(how_often or evaluator.settings.eval_every or "1epoch")
    torch.manual_seed(settings.seed)
    epoch_steps = 0
    with user_code():
        model = task.model().to(device)
        if interval.unit == "epochs":
            union = settings.batch_size * max(1, settings.num_workers)
            epoch_steps = -(-len(task.train_data()) // union)  # type: ignore[arg-type]

    def metrics() -> dict[str, float]:
        with user_code(), untouched(model):
            return {name: float(value) for name, value in task.evaluate(model).items()}

    tensors = ModelTensors(model, (), getattr(task, "averaged_buffers", ()))
    _watch(evaluator, tensors, interval, epoch_steps, metrics)


def _watch(
    evaluator: Evaluator,
    model: ModelTensors,
    interval: Every,
    epoch_steps: int,
    metrics: Callable[[], dict[str, float]],
) -> None:
    """Evaluate at each interval until the run is over. `epoch_steps`: training steps in an epoch."""
    each = interval.amount * (epoch_steps if interval.unit == "epochs" else 1)
    num_done = evaluated = count = 0
    began_at = time.monotonic()
    while True:
        step, version = evaluator.look()
        if evaluator.is_over:
            break
        over = int((time.monotonic() - began_at if interval.unit == "seconds" else step) // each)
        if over > num_done and version > evaluated and (pulled := evaluator.pull(model)) is not None:
            num_done, evaluated, count = over, pulled, count + 1
            try:
                found = metrics()
            except Exception as error:
                _, failure, exit_code = ending_of(error)
                evaluator.report(pulled, step, failure=failure, exit_code=exit_code)
                raise
            evaluator.report(pulled, step, metrics=found)
            log.info("evaluated", step=step, version=pulled, **found)
        else:
            sleep(_LOOK_S)
    log.info("run_over", evaluations=count)
    evaluator.close()


class EvaluatorSession(Session):
    """The session of a script that runs as an evaluator (worker.evaluate).

    Where the script's loop would begin, this session evaluates with the function of `evaluate()` until the run is over.
    Then it exits the process, because the code after the loop is meant for workers.
    """

    _tensors: ModelTensors

    def _open(self, may_overlap: bool) -> Strategy:
        self._evaluator = Evaluator(self._config)
        settings = self._evaluator.settings
        settings = replace(settings, eval_every=self._config.run.eval_every or settings.eval_every)
        # An evaluator is at no position of the run.
        progress = Progress(num_workers=settings.num_workers, total_steps=settings.steps)
        return Strategy(cast(Any, SimpleNamespace(settings=settings, progress=progress, begun=None)))

    @property
    def step(self) -> int:
        """Training steps of the run's slowest worker."""
        return self._evaluator.look()[0]

    @property
    def is_done(self) -> bool:
        self._watch_run()

    def _begin(
        self, model: nn.Module, optimizers: list[Optimizer], averaged_buffers: Collection[str], reduction: Reduction
    ) -> tuple[Optimizer, ...]:
        self._check_first(reduction)
        self._model, self._memory = model, Memory(DataPosition(self._strategy, optimizers, self.length))
        self._tensors = ModelTensors(model, parameters_of(*optimizers), averaged_buffers)
        for item in optimizers:
            item.register_step_pre_hook(lambda *_: self._watch_run())
            item.clip_grad_norm = check_max_norm  # type: ignore[attr-defined]  # no step follows
        return tuple(optimizers)

    def _watch_run(self) -> NoReturn:
        interval, epoch_steps = self.evaluation.every, self._joined().data.batches_per_epoch
        if interval is None or (interval.unit == "epochs" and not epoch_steps):
            raise UsageError(
                "an evaluator (worker.evaluate) whose script "
                + ("has no function to evaluate with" if interval is None else "does not say how long an epoch is"),
                fix="call session.evaluate(fn, every=100) before the loop; fn(model) returns a dict of metrics",
            )
        _watch(self._evaluator, self._tensors, interval, epoch_steps, lambda: self.evaluation.metrics(self._model))
        raise SystemExit(0)

    def record(self, *, loss: float | None = None, num_samples: int = 0, **metrics: float) -> None:
        pass

    def stop(self, reason: str) -> None:
        self._watch_run()

    def finish(self) -> bool:
        self._watch_run()

    def _close(self, ending: Ending) -> None:
        self._evaluator.close()
