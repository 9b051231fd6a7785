"""trackio: a local store with a dashboard (`trackio show`), in TRACKIO_DIR or trackio's default folder."""

from __future__ import annotations

from typing import Any

import trackio

from .base import Metrics, TrackedRun, Tracker


class TrackioTracker(Tracker):
    def start(self, run: TrackedRun) -> None:
        self._run: Any = trackio.init(project=run.project, name=run.name, config=run.config, resume="allow")
        self._step = run.step

    def log(self, step: int, metrics: Metrics) -> None:
        self._step = max(self._step, step)
        self._run.log(dict(metrics), step=step)

    def finish(self, metrics: Metrics, ended_by: str) -> None:
        self.log(self._step, metrics)
        self._run.finish()


ENTRY = TrackioTracker
