"""`ps-worker --evaluate`: no training, but the evaluations of a run whose workers go on meanwhile."""

from __future__ import annotations

import time

import torch

from ....common.config.conditions import every
from ....common.reporting.log import get_logger
from ....common.user_code import user_code
from ...conversation.interrupts import sleep
from ...conversation.spare import Spare
from ...tasks.base import Task
from ...tensors.transfer import ModelTensors
from ..ending import ending_of
from ..evaluation import untouched

log = get_logger()

_LOOK_S = 0.1


def evaluate_for(spare: Spare, task: Task, device: torch.device, how_often: str | None) -> int:
    """Until the run is over, every so many steps of its slowest worker, seconds or epochs (as its settings say where
    `how_often` does not; an epoch where neither does). How many evaluations that were."""
    settings, interval = spare.settings, every(how_often or spare.settings.eval_every or "1epoch")
    torch.manual_seed(settings.seed)
    with user_code():
        model = task.model().to(device)
        each = interval.amount
        if interval.unit == "epochs":
            union = settings.batch_size * max(1, settings.num_workers)
            each *= -(-len(task.train_data()) // union)  # type: ignore[arg-type]
    tensors, done, evaluated, count = ModelTensors(model), 0, 0, 0
    began_at = time.monotonic()
    while True:
        _, step, version = spare.look()
        if spare.is_over:
            return count
        over = int((time.monotonic() - began_at if interval.unit == "seconds" else step) // each)
        if over > done and version > evaluated and (pulled := spare.pull(tensors)) is not None:
            done, evaluated, count = over, pulled, count + 1
            _evaluate(spare, task, model, pulled, step)
        else:
            sleep(_LOOK_S)


def _evaluate(spare: Spare, task: Task, model: torch.nn.Module, version: int, step: int) -> None:
    try:
        with user_code(), untouched(model):
            figures = {name: float(value) for name, value in task.evaluate(model).items()}
    except Exception as error:
        _, failure, exit_code = ending_of(error)
        spare.tell(version, step, failure=failure, exit_code=exit_code)
        raise
    spare.tell(version, step, figures=figures)
    log.info("evaluated", step=step, version=version, **figures)
