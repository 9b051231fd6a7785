"""trackio: a local store with a dashboard (`trackio show`), in TRACKIO_DIR or trackio's default folder."""

from __future__ import annotations

from typing import Any

import trackio

from .base import Metrics, TrackedRun, Tracker


class TrackioTracker(Tracker):
    def start(self, run: TrackedRun) -> None:
        self._run: Any = trackio.init(project=run.project, name=run.name, config=run.config, resume="allow")

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, step: int, metrics: Metrics, ended_by: str) -> None:
        self.log(step, metrics)
        self._run.finish()


ENTRY = TrackioTracker
