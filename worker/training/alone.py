"""What a run without a server reports: the same events, summary and files as a server's."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch

from ...common.config.schema import Config
from ...common.errors import OutputError
from ...common.reporting.log import get_logger
from ...common.reporting.output import write_weights
from ...common.reporting.report import report_console, summary_table
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
                log.info("status", **self._status())

    def _status(self) -> dict[str, Any]:
        session = self._session
        elapsed_s = time.perf_counter() - session.started_at
        row = {
            "rank": 0, "state": "computing", "step": session.num_steps, "lead": 0,
            "loss": session.loss if session.loss == session.loss else None,
            "samples_per_s": round(session.num_samples / elapsed_s, 1) if elapsed_s else 0.0,
            "compute_share": 1.0, "transfer_share": 0.0, "wait_share": 0.0, "waiting_for": "",
        }  # fmt: skip
        return {
            "mode": "single", "version": session.num_steps, "elapsed_s": round(elapsed_s, 2),
            "step": session.num_steps, "steps": session.settings.steps, "num_joined": 1,
            "waiting": "", "workers": [row],
        }  # fmt: skip

    def write(self, model_tensors: dict[str, torch.Tensor], wall_s: float) -> Summary:
        """Save weights and summary where the configuration says; show or log the summary."""
        session, output = self._session, self._config.output
        worker = WorkerSummary(rank=0, steps=session.num_steps, samples=session.num_samples, compute_s=round(wall_s, 3))
        summary = Summary(
            mode="single", updates=session.num_steps, version=session.num_steps, wall_s=round(wall_s, 3),
            final=session.figures, workers=[worker],
        )  # fmt: skip
        try:
            if output.save is not None:
                tensors = {name: tensor.detach().cpu().clone() for name, tensor in model_tensors.items()}
                write_weights(output.save, tensors, {"mode": "single"})
                log.info("saved", path=output.save)
            if output.summary is not None:
                summary.write(output.summary)
        except OSError as error:
            raise OutputError(f"cannot write the results: {error}", fix="free some space and run again") from None
        if self._config.log.format == "json":
            log.info("summary", **summary.model_dump())
        else:
            report_console(sys.stdout).print(summary_table(summary))
        return summary
