"""`ps-launch --web`: the page of a job, what eviction means to it, and the same address after a server's death."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from contextlib import suppress

import psutil
import pytest

from paramserver.tests.loopback.conftest import DEADLINE_S, Cluster, Process

pytest.importorskip("starlette", reason="pip install 'paramserver[web]'")


def address_of(job: Process) -> str:
    job.until(lambda: "/?token=secret" in job.output, "page")
    found = re.search(r"http://(127\.0\.0\.1:\d+)/\?token=secret", job.output)
    assert found is not None
    return found[1]


def ask(address: str, path: str, order: dict | None = None) -> dict:
    body = None if order is None else json.dumps(order).encode()
    request = urllib.request.Request(f"http://{address}{path}", body, {"Authorization": "Bearer secret"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return json.loads(answer.read())


def step_of(address: str) -> int:
    with suppress(OSError, TypeError, KeyError):
        return ask(address, "/api/runs/live/status")["status"]["step"]
    return -1


def until_beyond(job: Process, address: str, step: int) -> None:
    job.until(lambda: step_of(address) > step, f"step beyond {step}")


def server_of(job: Process) -> psutil.Process:
    """The one that listens."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for child in psutil.Process(job.popen.pid).children(recursive=True):
            with suppress(psutil.Error):
                if any("paramserver.ps" in part for part in child.cmdline()):
                    return child
    raise AssertionError("no server")


def test_a_job_with_a_page(cluster: Cluster) -> None:
    job = cluster.start(
        "job", "-m", "paramserver.launch", "-n", "2", "--mode", "async", "--task", "digits",
        "--steps", "100000", "--web",
        "--checkpoint-dir", "snapshots", "--checkpoint-every", "20", "--set", "slowdown.base_s=0.01",
        "--set", "server.status_interval_s=0.1", PS_WEB_TOKEN="secret",
    )  # fmt: skip
    address = address_of(job)
    until_beyond(job, address, 30)
    os.kill(server_of(job).pid, signal.SIGKILL)
    job.until(lambda: job.output.count("/?token=secret") == 2, "second page")
    assert job.output.count(address) >= 2  # where it was
    until_beyond(job, address, 60)
    assert "worker 1 is evicted" in ask(address, "/api/runs/live/controls", {"do": "evict", "rank": 1})["done"]
    until_beyond(job, address, step_of(address) + 20)
    ask(address, "/api/runs/live/controls", {"do": "drain"})
    assert job.wait() == 0, job.output
    assert "restart 1 of 3" not in job.output.partition("evicted")[2]
