"""trackio: a local store and page (`trackio show`), in TRACKIO_DIR or where trackio keeps it."""

from __future__ import annotations

from typing import Any

import trackio

from .base import Figures, TrackedRun, Tracker


class TrackioTracker(Tracker):
    def start(self, run: TrackedRun) -> None:
        self._run: Any = trackio.init(project=run.project, name=run.name, config=run.config, resume="allow")
        self._step = run.step

    def log(self, step: int, figures: Figures) -> None:
        self._step = max(self._step, step)
        self._run.log(dict(figures), step=step)

    def finish(self, figures: Figures, ended_by: str) -> None:
        self.log(self._step, figures)
        self._run.finish()


ENTRY = TrackioTracker
