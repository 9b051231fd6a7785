"""Weights & Biases, also offline (WANDB_MODE=offline). Account and server come from wandb's own settings."""

from __future__ import annotations

import wandb

from .base import Metrics, TrackedRun, Tracker


class WandbTracker(Tracker):
    def start(self, run: TrackedRun) -> None:
        self._run = wandb.init(
            project=run.project, dir=run.folder, name=run.name, id=run.run, resume="allow", config=run.config,
            settings=wandb.Settings(silent=True),
        )  # fmt: skip
        # wandb's own step can only increase, so it would ignore metrics after the server goes back to a snapshot.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({"step": step, **metrics})

    def finish(self, step: int, metrics: Metrics, ended_by: str) -> None:
        self._run.summary.update({**metrics, "ended_by": ended_by})
        self._run.finish(exit_code=int(bool(ended_by)))


ENTRY = WandbTracker
