"""Samples that a script's steps were computed from: shown where somebody said them, and as unknown elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paramserver.catalog.showing import plot
from paramserver.common.errors import UsageError
from paramserver.common.reporting.report import report_console, summary_table
from paramserver.common.reporting.summary import Summary
from paramserver.common.runstore.reading import RunStore
from paramserver.tests.cluster import Cluster, Process, end_well

SCRIPT = Path(__file__).parent / "ordinary" / "own_loader.py"
FLAGS = ("--summary", "s.json", "--history", "h.jsonl", "--set", "server.status_interval_s=0.05")


def run(cluster: Cluster, mode: str, *envs: dict[str, str]) -> tuple[Process, Summary]:
    """A script that does not use `session.shard()`, with 8 samples a step."""
    flags = ("--local-steps", "2") if mode == "localsgd" else ()
    server = cluster.server("--mode", mode, "--workers", str(len(envs)), "--steps", "4", *FLAGS, *flags)
    ranks = [cluster.script(rank, SCRIPT, SEED=str(rank), STEP_S="0.2", **env) for rank, env in enumerate(envs)]
    end_well(*ranks, server)
    return server, Summary.model_validate_json((cluster.folder / "s.json").read_text())


def last_status(server: Process) -> dict[str, Any]:
    """The newest one in which every worker has contributed."""
    statuses = [status for status in server.events("status") if all(row["contributions"] for row in status["workers"])]
    return statuses[-1]


def printed(summary: Summary) -> str:
    console = report_console()
    with console.capture() as shown:
        console.print(summary_table(summary))
    return shown.get()


@pytest.mark.parametrize(
    "mode", ["sync", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("async", "localsgd", "allreduce"))]
)
def test_samples_that_nobody_said_are_unknown(cluster: Cluster, mode: str) -> None:
    server, summary = run(cluster, mode, {}, {})
    assert [worker.samples for worker in summary.workers] == [None, None] and summary.samples is None
    table = printed(summary)
    column = 3 if mode == "localsgd" else 2  # with local steps, contributions have a column too
    assert "   - samples/s" in table and [row.split()[column] for row in table.splitlines()[-2:]] == ["-", "-"]
    status = last_status(server)
    assert (status["samples"], status["samples_per_s"]) == (None, None)
    assert [(row["samples"], row["samples_per_s"]) for row in status["workers"]] == [(None, None)] * 2
    accepted = [line for line in cluster.history() if line.get("outcome") == "accepted"]
    assert accepted and all(line["samples"] is None for line in accepted)
    with RunStore(cluster.folder / "runs" / "paramserver.db") as store:
        (stored,) = store.runs()
        assert (stored.samples, stored.samples_per_s) == (None, None)
        point, worker = store.series(stored)[-1], store.worker_series(stored)[-1]
        assert [point.samples, point.samples_per_s, worker.samples, worker.samples_per_s] == [None] * 4
    with pytest.raises(UsageError, match="has 0 points of loss over samples"):
        plot(cluster.folder / "runs" / "paramserver.db", stored.id, ("loss", "samples"), None, as_json=True)


@pytest.mark.slow
def test_samples_that_a_script_says_are_shown_and_a_sum_with_unknown_ones_is_not(cluster: Cluster) -> None:
    server, summary = run(cluster, "async", {"SAID": "1"}, {})
    assert [worker.samples for worker in summary.workers] == [4 * 8, None]
    assert summary.samples is None and last_status(server)["samples"] is None
    assert {line["samples"] for line in cluster.history() if line.get("outcome") == "accepted"} == {8, None}
