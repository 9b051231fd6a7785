"""What a run without a server reports: the same events, summary and files as a server's."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import torch

from ...common.config.schema import Config
from ...common.reporting.log import get_logger
from ...common.reporting.output import write_results
from ...common.reporting.status import Status, WorkerStatus
from ...common.reporting.summary import Summary, WorkerSummary
from ..api import AloneSession

log = get_logger()


class AloneReport:
    """Emits `status` events while the session trains, and the results at its end."""

    def __init__(self, session: AloneSession, config: Config) -> None:
        self._session = session
        self._config = config
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._report, daemon=True)

    def __enter__(self) -> AloneReport:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def _report(self) -> None:
        # Reads counters only: a number read a step late is as good.
        while not self._stop.wait(self._config.server.status_interval_s):
            if self._config.log.format == "json":
                log.info("status", **self._status().fields())

    def _status(self) -> Status:
        session = self._session
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

    def write(self, model_tensors: dict[str, torch.Tensor], wall_s: float) -> None:
        """Save weights and summary where the configuration says; show or log the summary."""
        session = self._session
        worker = WorkerSummary(rank=0, steps=session.num_steps, samples=session.num_samples, compute_s=round(wall_s, 3))
        summary = Summary(
            mode="single", updates=session.num_steps, version=session.num_steps, wall_s=round(wall_s, 3),
            final=session.figures, workers=[worker],
        )  # fmt: skip
        tensors = {}
        if self._config.output.save is not None:
            tensors = {name: tensor.detach().cpu().clone() for name, tensor in model_tensors.items()}
        write_results(self._config, summary, tensors, {"mode": "single", "version": str(session.num_steps)})
