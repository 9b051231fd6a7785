"""DataLoader with forked processes in a worker: no end of the worker goes unnoticed."""

from __future__ import annotations

import signal
import time

import pytest


@pytest.mark.campaign
def test_a_killed_worker_with_forked_loaders_is_noticed_at_once(job):
    """Its loaders have copies of its sockets; they must end with it, or no connection closes."""
    server = job.server(
        "--mode", "sync", "--workers", "2", "--steps", "3000", "--history", "history.jsonl",
        "--set", "server.lease_s=20", "--set", "server.absent_s=0",
    )  # fmt: skip
    pause = {"PS_SLOWDOWN__BASE_S": "0.3"}
    survivor, victim = (job.script(rank, "forking_loader.py", **pause) for rank in range(2))
    job.until(lambda: job.history.last_step(1) >= 2, "first steps")
    victim.signal(signal.SIGKILL)
    killed = time.monotonic()
    victim.popen.wait()
    job.until(lambda: job.history.ends_of(1), "departure of the killed worker")
    (left,) = job.history.lines("leave", rank=1)
    job.until(lambda: job.history.commits_of({0})[-1] > left["t"], "commit of the other")
    assert left["how"] == "closed"
    assert job.history.stall({0}, killed, left["t"]) <= 1.3  # steps take 0.3 s
    for process in (survivor, server):
        process.signal(signal.SIGTERM)
        process.wait()
    job.history.check()
