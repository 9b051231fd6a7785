"""MLflow, at MLFLOW_TRACKING_URI or in FOLDER/mlflow.db. It needs `mlflow`, or `mlflow-skinny` with SQLAlchemy."""

from __future__ import annotations

import os
import time
from pathlib import Path

import mlflow
from mlflow.entities import Metric, Param, RunTag

from .base import Metrics, TrackedRun, Tracker

_AT_ONCE = 1000  # most metrics that an MLflow server accepts in one request
_PARAMS_AT_ONCE = 100  # most parameters in one request
_LONGEST = 500  # most characters of a parameter


class MlflowTracker(Tracker):
    def start(self, run: TrackedRun) -> None:
        folder = Path(run.folder)
        if not (uri := os.environ.get("MLFLOW_TRACKING_URI", "")):
            folder.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{(folder / 'mlflow.db').absolute()}"
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._metrics: list[Metric] = []
        known = self._client.get_experiment_by_name(run.project)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(run.project)
        same = self._client.search_runs([experiment], f"tags.paramserver_run = '{run.run}'", max_results=1)
        if same:  # the run resumed from a snapshot
            self._run = same[0].info.run_id
            self._client.update_run(self._run, "RUNNING")
            return
        self._run = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = [
            Param(f"{section}.{key}", str(value)[:_LONGEST])
            for section, values in run.config.items()
            for key, value in values.items()
            if value is not None
        ]
        tags = [RunTag("paramserver_run", run.run)]
        for first in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(self._run, params=params[first : first + _PARAMS_AT_ONCE], tags=tags)

    def log(self, step: int, metrics: Metrics) -> None:
        now = int(time.time() * 1000)
        self._metrics += [Metric(name, value, now, step) for name, value in metrics.items()]

    def flush(self) -> None:
        metrics, self._metrics = self._metrics, []
        for first in range(0, len(metrics), _AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[first : first + _AT_ONCE])

    def finish(self, step: int, metrics: Metrics, ended_by: str) -> None:
        self.log(step, metrics)
        self.flush()
        self._client.set_tag(self._run, "ended_by", ended_by or "all steps taken")
        self._client.set_terminated(self._run, "FAILED" if ended_by else "FINISHED")


ENTRY = MlflowTracker
