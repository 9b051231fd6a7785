"""Runs whose workers are started by an engine, and whose weights say what was applied how often."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paramserver.tests.cluster import Cluster, Process
from paramserver.tests.engines import slurm
from paramserver.tests.engines.slurm import SlurmCluster

BATCH = 4


class EngineRun(Cluster):
    """A server that trains the ledger task, and programs that start its workers."""

    history = "history.jsonl"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # What this test process may itself have been started by; and a run whose workers all go waits for them.
        engines = ("SLURM_", "OMPI_", "PMI_", "MPI_LOCAL", "LOCAL_", "MASTER_", "JOB_COMPLETION", "TORCHELASTIC_")
        self._env = {name: value for name, value in self._env.items() if not name.startswith(engines)}
        self._env |= {"PS_SERVER__ABSENT_S": "60", "COLUMNS": "200"}
        self.steps = self.num_workers = 0

    @staticmethod
    def task_flags(num_workers: int, steps: int) -> list[str]:
        """One epoch of the ledger: each sample is applied once when nothing is lost or repeated."""
        return [
            "--workers", str(num_workers), "--steps", str(steps), "--batch-size", str(BATCH), "--task", "ledger",
            "--set", f"task.args={{samples: {num_workers * steps * BATCH}}}", "--optimizer", "sgd", "--lr", "1",
        ]  # fmt: skip

    def serve(self, mode: str, num_workers: int, steps: int, *flags: str) -> Process:
        self.steps, self.num_workers = steps, num_workers
        return self.server(
            "--mode", mode, *self.task_flags(num_workers, steps), "--history", self.history, "--summary", "s.json",
            *flags,
        )  # fmt: skip

    def program(self, name: str, *argv: str, **env: str) -> Process:
        """One that is no Python of ours: torchrun, srun, mpirun."""
        path = Path(sys.executable).parent / argv[0]
        program = str(path) if path.exists() else argv[0]
        process = Process(name, [program, *argv[1:]], self._env | env, self.folder)
        self.processes.append(process)
        return process

    @property
    def environ(self) -> dict[str, str]:
        return self._env

    def num_commits(self) -> int:
        path = self.folder / self.history
        return path.read_bytes().count(b'"op":"commit"') if path.exists() else 0

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "s.json").read_text())  # type: ignore[no-any-return]

    def prove(self, restarts: int | None = 0) -> None:
        """Every contribution was applied exactly once: the weights say so, and the history."""
        summary = self.summary()
        final, workers = summary["final"], summary["workers"]
        contributions = self.steps // summary["local_steps"]
        assert [worker["contributions"] for worker in workers] == [contributions] * self.num_workers
        assert [worker["training_steps"] for worker in workers] == [self.steps] * self.num_workers
        if restarts is not None:
            assert [worker["restarts"] for worker in workers] == [restarts] * self.num_workers
        assert (final["missing"], final["repeated"], final["torn"]) == (0, 0, 0), final
        if summary["mode"] in ("async", "ssp"):  # each gradient by itself: whole numbers
            assert final["applied"] == self.steps * self.num_workers * BATCH
            assert final["clock"] == self.steps * self.num_workers
        else:  # means of all
            assert final["applied"] == pytest.approx(self.steps * BATCH, rel=1e-5)
            assert final["clock"] == self.steps
        self.check_history()

    def check_history(self) -> None:
        checked = self.command("launch", "check", str(self.folder / self.history))
        assert checked.returncode == 0, checked.stdout + checked.stderr


def settings(output: str) -> dict[str, tuple[str, str]]:
    """The rows of a --print-config: value and origin of each key."""
    rows: dict[str, tuple[str, str]] = {}
    for line in output.splitlines():
        key, _, rest = line.strip().partition(" ")
        if "." in key:
            value, _, origin = rest.strip().partition("  ")
            rows[key] = (value.strip(), origin.strip())
    return rows


@pytest.fixture
def run(tmp_path: Path) -> Iterator[EngineRun]:
    run = EngineRun(tmp_path)
    yield run
    run.stop()


@pytest.fixture(scope="module")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Three nodes; the tests that need them say loudly that they were not run."""
    yield from slurm.running(tmp_path_factory.mktemp("slurm"))
