"""DataLoader with forked processes in a worker: no hang, and no end of the worker that goes unnoticed."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "loader.py"
BATCHES = 3


def loaders_of(worker) -> list[list[int]]:
    """[number so far, pid ...] as the script prints them."""
    return [
        [int(word) for word in line.split()[1:]] for line in worker.output.splitlines() if line.startswith("loaders ")
    ]


@pytest.mark.campaign
def test_a_hundred_short_epochs_with_forked_loaders(job, metric):
    epochs = 100
    server = job.server("--mode", "async", "--workers", "2", "--steps", str(BATCHES * epochs), "--history", "h.jsonl")
    began = time.monotonic()
    workers = [job.script(rank, SCRIPT, "2") for rank in range(2)]
    for count in (epochs // 2, epochs):  # of twice as many; a hang is the end of progress, however slow the machine is
        job.until(lambda count=count: min(len(loaders_of(worker)) for worker in workers) >= count, f"{count} loaders")
    job.end(*workers, server)
    metric("seconds", time.monotonic() - began)
    numbers = [loaders_of(worker)[-1][0] for worker in workers]
    metric("processes forked by each worker", numbers)
    assert min(numbers) >= epochs  # two an epoch, of which each shows at least one


@pytest.mark.campaign
def test_a_killed_worker_with_forked_loaders_is_noticed_at_once(job, metric):
    """Its loaders have copies of its sockets; they must end with it, or no connection closes."""
    server = job.server(
        "--mode", "sync", "--workers", "2", "--steps", "3000", "--history", "history.jsonl",
        "--set", "server.lease_s=20", "--set", "server.absent_s=0",
    )  # fmt: skip
    pause = {"PS_SLOWDOWN__BASE_S": "0.3"}
    survivor, victim = (job.script(rank, SCRIPT, "2", **pause) for rank in range(2))
    job.until(lambda: job.history.last_step(1) >= 2, "first steps")
    victim.signal(signal.SIGKILL)
    killed = time.monotonic()
    victim.popen.wait()
    job.until(lambda: job.history.ends_of(1), "departure of the killed worker")
    (left,) = job.history.lines("leave", rank=1)
    metric("from the kill to its departure, s", left["t"] - killed)
    job.until(lambda: job.history.commits_of({0})[-1] > left["t"], "commit of the other")
    metric("others' stall with steps of 0.3 s, s", stall := job.history.stall({0}, killed, left["t"]))
    assert left["how"] == "closed"
    assert stall <= 1.3
    survivor.signal(signal.SIGTERM)
    survivor.wait()
    server.signal(signal.SIGTERM)
    server.wait()
    job.history.check()
