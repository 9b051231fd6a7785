"""TensorBoard: event files under FOLDER/<mode>-<run>, for `tensorboard --logdir FOLDER`."""

from __future__ import annotations

from pathlib import Path

from tensorboardX import SummaryWriter

from ....common.wire.json_text import to_json
from .base import Metrics, TrackedRun, Tracker


class TensorBoardTracker(Tracker):
    def start(self, run: TrackedRun) -> None:
        # Hides the metrics that were written after the snapshot from which the run resumed.
        purge_step = run.step + 1 if run.step else None
        self._writer = SummaryWriter(str(Path(run.folder) / run.name), purge_step=purge_step)
        self._writer.add_text("config", f"```\n{to_json(run.config, indent=2)}\n```", run.step)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def finish(self, step: int, metrics: Metrics, ended_by: str) -> None:
        self.log(step, metrics)
        self._writer.close()


ENTRY = TensorBoardTracker
