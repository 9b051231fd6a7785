"""Hugging Face Accelerate: the prepared optimizer's step becomes a step of the run.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
session = join(accelerator, model, optimizer, loader)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..common.errors import UsageError
from ..common.reporting.log import get_logger
from ..worker.api import connect
from ..worker.training.session import Session
from . import lacks
from .data import check_place, divide, num_samples_in

try:
    from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step
    from accelerate.state import AcceleratorState, PartialState
except ImportError as error:
    raise lacks("accelerate", error) from None

log = get_logger()


def take_place(session: Session) -> None:
    """Set Accelerate's rank, so that rank 0 saves and prints. Raises UsageError if it has its own process group."""
    states = PartialState(), AcceleratorState()
    if states[0].num_processes > 1:
        raise UsageError(
            f"Accelerate has made a group of {states[0].num_processes} processes of its own (WORLD_SIZE or torchrun): "
            "gradients would be averaged twice",
            fix="start the workers with ps-launch train.py, or one by one, without `accelerate launch` and torchrun",
        )
    for state in states:
        state.process_index = state.local_process_index = session.rank


def take_step(session: Session, model: nn.Module, optimizer: AcceleratedOptimizer, goes_on: bool) -> None:
    """Join the run with the objects that Accelerate prepared, once weights and optimizer state are loaded.

    `goes_on`: the trainer continues from its checkpoint.
    """
    goes_on |= bool(optimizer.state)
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for group in groups:  # what the run began with: one that is loaded or scheduled is further on
        group["lr"] = group.get("initial_lr", group["lr"])
    if not session.settings.kind.worker_steps:
        optimizer.optimizer.state.clear()
    optimizer.optimizer = inner = session.optimizer(model, optimizer.optimizer)
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    if goes_on and not session.settings.kind.worker_steps and not session.step:
        log.warning(
            "optimizer_state_not_loaded",
            meaning="training goes on from the checkpoint's weights; moments are the server's, and begin anew in a new "
            "run (ps-server --checkpoint-dir goes on with them)",
        )
    if optimizer.scaler is not None:  # it has kept the other one's step
        session.watched(optimizer.scaler)
        optimizer._optimizer_original_step_method = inner.step
        optimizer._optimizer_patched_step_method = patch_optimizer_step(optimizer, inner.step)


def join(
    accelerator: Any,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    loader: Any = None,
    *,
    address: str | None = None,
    rank: int | None = None,
) -> Session:
    """Join the run (`connect()`) with the objects that `accelerator.prepare` returned.

    From then on `loader` yields this rank's share and ends with the run. Raises UsageError for unsupported settings.
    """
    session = connect(address, rank)
    take_place(session)
    take_step(session, accelerator.unwrap_model(model), optimizer, goes_on=False)
    if (share := divide(loader, session)) is not None:
        share.go_to(session.step, 0, loader, accelerator.gradient_accumulation_steps)
    if loader is not None:

        class Counting(type(loader)):  # type: ignore[misc]
            """Tells of each batch when the script gets it."""

            def __iter__(self) -> Iterator[Any]:
                for items in super().__iter__():
                    session.record(num_samples=num_samples_in(items, loader))
                    yield items

        Counting.__name__ = type(loader).__name__
        vars(object)["__class__"].__set__(loader, Counting)  # Accelerate's loaders show the class of another one
    step = optimizer.step

    def step_of_run(closure: Any = None) -> None:
        if not session.is_done:  # the loader fetches ahead, and had a batch more
            step(closure)
            check_place(session)

    optimizer.step = step_of_run
    return session
