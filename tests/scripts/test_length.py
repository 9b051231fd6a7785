"""How long a run is: what it was given, or as many epochs as it was given, or what the scripts' loops take."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from paramserver.tests.cluster import Cluster, Process, end_well

EPOCHS = Path(__file__).parent / "length" / "epochs.py"
MODES = {"sync": (), "localsgd": ("--local-steps", "4"), "async": (), "ssp": ("--staleness", "1")}


def run(cluster: Cluster, *flags: str, num_steps: int = 0) -> tuple[Process, list[Process]]:
    outputs = ("--summary", "s.json", "--set", "server.status_interval_s=0.05")
    server = cluster.server("--workers", "2", *outputs, *flags)
    workers = [cluster.script(rank, EPOCHS, str(num_steps)) for rank in range(2)]
    end_well(*workers, server)
    return server, workers


def counts(worker: Process) -> list[int]:
    """Steps behind it at the end of each epoch of its loop."""
    return [int(line.split()[-1]) for line in worker.output.splitlines() if " epoch " in line]


def final(worker: Process) -> str:
    return worker.output.rpartition(" has ")[2].strip()


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.slow) for mode in ("localsgd", "sync", "async", "ssp")]
)
def test_a_script_s_own_loop_rules_where_nobody_has_set_a_length(cluster: Cluster, mode: str) -> None:
    """40 samples, two workers, batches of 4: 5 steps an epoch. In localsgd no step is lost that a round has not."""
    server, workers = run(cluster, "--mode", mode, *MODES[mode], num_steps=3)
    assert [counts(worker) for worker in workers] == [[5, 10, 15]] * 2
    assert final(workers[0]) == final(workers[1]) != ""
    assert cluster.summary()["version"] == {"sync": 15, "localsgd": 4}.get(mode, 30)
    assert all(event["steps"] == 0 for event in server.events("status"))
    assert [worker["samples"] for worker in cluster.summary()["workers"]] == [60, 60]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "localsgd"])
def test_epochs_of_the_run_become_steps(cluster: Cluster, mode: str) -> None:
    server, workers = run(cluster, "--mode", mode, *MODES[mode], "--epochs", "3")
    assert [counts(worker) for worker in workers] == [[15], [15]]
    assert [event["steps"] for event in server.events("length")] == [15]
    assert cluster.summary()["version"] == {"sync": 15, "localsgd": 4}[mode]


@pytest.mark.slow
def test_a_run_goes_on_with_more_epochs_and_knows_when_it_is_done(cluster: Cluster) -> None:
    kept = ("--checkpoint-dir", "snapshots", "--mode", "sync")
    run(cluster, *kept, "--epochs", "1")
    _, workers = run(cluster, *kept, "--epochs", "3")
    assert [counts(worker) for worker in workers] == [[10], [10]]
    assert cluster.summary()["version"] == 15
    again = cluster.server("--workers", "2", *kept, "--epochs", "3")
    assert (again.wait(), again.event("already_done")["steps"]) == (0, 15)


@pytest.mark.slow
def test_a_task_is_trained_for_epochs_or_its_default(cluster: Cluster) -> None:
    """1,438 samples of the digits, two workers, batches of 100: 8 steps."""
    server = cluster.server("--workers", "2", "--epochs", "1", "--batch-size", "100", "--summary", "s.json")
    workers = [cluster.worker(rank, "--task", "digits") for rank in range(2)]
    end_well(*workers, server)
    assert cluster.summary()["version"] == 8
    server = cluster.server("--workers", "1", "--summary", "s.json", "--task", "xor", "--mode", "localsgd")
    end_well(cluster.worker(0), server)
    row = cluster.summary()["workers"][0]
    assert (row["training_steps"], row["contributions"]) == (500, 63), "8 steps in a contribution"


def test_epochs_need_to_know_among_how_many(cluster: Cluster) -> None:
    done = cluster.command("ps", "--epochs", "3")
    assert done.returncode == 2 and "run.epochs is 3" in done.stderr and "--workers" in done.stderr


def test_the_stronger_source_says_the_length(cluster: Cluster) -> None:
    (cluster.folder / "run.yaml").write_text("run:\n  steps: 7\n")
    shown = cluster.command("ps", "--config", "run.yaml", "--epochs", "3", "--print-config").stdout
    assert any(line.split()[:2] == ["run.steps", "None"] for line in shown.splitlines()), shown
    both = cluster.command("ps", "--steps", "3", "--epochs", "3")
    assert both.returncode == 2 and "one length" in both.stderr


ACCEPTS = {"PS_WORKER__ACCEPT_OTHER_DATA": "1"}


def on_data(cluster: Cluster, lengths: tuple[int, int], steps: int, *flags: str, **env: str) -> list[Process]:
    """A script whose ranks have data sets of these lengths, beside its server, which is the last."""
    server = cluster.server("--mode", "sync", "--workers", "2", "--steps", str(steps), *flags)
    return [*(cluster.script(rank, EPOCHS, "0", NUM=str(num), **env) for rank, num in enumerate(lengths)), server]


def refused(process: Process) -> bool:
    text = " ".join(process.output.split())
    assert "Traceback" not in text
    numbers = ("300 samples" in text and "400" in text) or ("400 samples" in text and "300" in text)
    return numbers and "worker.accept_other_data=true" in text


def test_a_run_that_resumes_on_data_of_another_length_is_refused_unless_it_is_accepted(cluster: Cluster) -> None:
    kept = ("--checkpoint-dir", "snapshots")
    end_well(*on_data(cluster, (400, 400), 3, *kept))
    *ranks, server = on_data(cluster, (300, 300), 6, *kept)
    assert [rank.wait() for rank in ranks] == [12, 12] and all(refused(rank) for rank in ranks), ranks[0].output
    server.signal(signal.SIGTERM)
    server.wait()
    again = on_data(cluster, (300, 300), 6, *kept, **ACCEPTS)
    end_well(*again)


def test_ranks_with_data_of_different_lengths_are_refused_unless_they_accept_it(cluster: Cluster) -> None:
    *ranks, _ = on_data(cluster, (400, 300), 200, "--set", "policy.min_workers=2")
    ranks[0].until(lambda: any(refused(rank) for rank in ranks), "a rank is refused")
    other = next(rank for rank in ranks if refused(rank))
    assert other.wait() == 12
    ranks.remove(other)
    ranks[0].kill()
    accepting = on_data(cluster, (400, 300), 4, **ACCEPTS)
    end_well(*accepting)
