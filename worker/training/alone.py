"""What a run without a server reports: the same events, summary and files as a server's."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...common.config.schema import Config
from ...common.reporting.log import get_logger
from ...common.reporting.output import write_results
from ...common.reporting.status import Status, WorkerStatus
from ...common.reporting.summary import Summary, WorkerSummary
from ..api import AloneSession

log = get_logger()


@contextmanager
def reporting(session: AloneSession, config: Config) -> Iterator[None]:
    """Emits `status` events while the session trains, where the log is for programs."""
    stop = threading.Event()

    def report() -> None:
        # Reads counters only: a number read a step late is as good.
        while not stop.wait(config.server.status_interval_s):
            if config.log.format == "json":
                log.info("status", **_status(session).fields())

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _status(session: AloneSession) -> Status:
    elapsed_s = time.perf_counter() - session.started_at
    worker = WorkerStatus(
        rank=0,
        state="computing",
        step=session.num_steps,
        loss=session.loss if math.isfinite(session.loss) else None,
        samples_per_s=round(session.num_samples / elapsed_s, 1) if elapsed_s else 0.0,
        compute_share=1.0,
    )
    return Status(
        mode="single",
        version=session.num_steps,
        elapsed_s=round(elapsed_s, 2),
        step=session.num_steps,
        steps=session.settings.steps,
        num_joined=1,
        workers=[worker],
    )


def write_alone(session: AloneSession, config: Config, model_tensors: dict[str, torch.Tensor], wall_s: float) -> None:
    """Save weights and summary where the configuration says; show or log the summary."""
    worker = WorkerSummary(rank=0, steps=session.num_steps, samples=session.num_samples, compute_s=round(wall_s, 3))
    summary = Summary(
        mode="single", updates=session.num_steps, version=session.num_steps, wall_s=round(wall_s, 3),
        ended_by=session.ended_by, final=session.figures, workers=[worker],
    )  # fmt: skip
    tensors = {}
    if config.output.save is not None:
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in model_tensors.items()}
    write_results(config, summary, tensors, {"mode": "single", "version": str(session.num_steps)})
