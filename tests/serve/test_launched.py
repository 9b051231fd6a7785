"""`ps-launch --serve`: ps-serve beside a run, started again when it dies, and linked by the dashboard."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest

from paramserver.launch.main import with_port
from paramserver.tests.cluster import Cluster, Process
from paramserver.tests.ports import free_port
from paramserver.tests.serve.test_api import FLAGS, ask
from paramserver.tests.web.test_launch import ask as ask_dashboard

pytest.importorskip("starlette", reason="pip install 'paramserver[serve]'")


def served(job: Process, num: int) -> list[dict[str, Any]]:
    """The versions of ps-serve, once so many of its processes have served one."""

    def versions() -> list[dict[str, Any]]:
        events = job.events()
        begins = [at for at, event in enumerate(events) if event.get("event") == "serve"][num - 1 :]
        return [event for event in events[begins[0] :] if event.get("event") == "serving"] if begins else []

    job.until(lambda: bool(versions()), f"version of process {num} of ps-serve")
    return versions()


@pytest.mark.slow
def test_ps_serve_dies_and_is_back_and_the_run_goes_on(cluster: Cluster) -> None:
    port = free_port()
    job = cluster.start(
        "job", "-m", "paramserver.launch", "-n", "1", "--mode", "async", "--task", "gpt", *FLAGS, "--steps", "1000000",
        "--web", "--serve", str(port), "--set", "launch.backoff_s=0.01", "--set", "slowdown.base_s=0.01",
        PS_WEB_TOKEN="secret",
    )  # fmt: skip
    served(job, 1)
    url = f"http://127.0.0.1:{port}"
    assert job.events("serve")[0]["url"] == f"{url}/" and job.events("serve")[0]["role"] == "serve"
    assert ask(url, "/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
    dashboard = job.event("dashboard")["address"]
    assert ask_dashboard(dashboard, "/api/runs/live")["about"]["settings"]["launch"]["serve"] == port
    children = psutil.Process(job.popen.pid).children(recursive=True)
    (process,) = [child for child in children if "paramserver.serve" in child.cmdline()]
    os.kill(process.pid, signal.SIGKILL)
    served(job, 2)
    assert [event["role"] for event in job.events("restarting")] == ["serve"]
    assert ask(url, "/health")[1]["status"] == "ok"
    ask_dashboard(dashboard, "/api/runs/live/controls", {"do": "drain"})
    assert job.wait() == 0, job.output
    assert psutil.pid_exists(process.pid) is False


def test_what_cannot_be_served_is_said_before_the_run(cluster: Cluster) -> None:
    for flags, message in (
        (("--mode", "single", "--serve"), "there is no server to follow"),
        (("--script", __file__, "--serve"), "ps-serve needs the model as a task"),
        (("--backend", "slurm", "--serve"), "no host is known for ps-serve"),
    ):
        done = cluster.command("launch", *flags)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
    dry = cluster.command("launch", "--serve", "8011", "--dry-run")
    assert "[serve] " in dry.stdout and "serve.listen=127.0.0.1:8011 --server HOST:PORT" in dry.stdout


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["--serve"], ["--serve=0"]),
        (["--serve", "8001", "run.yaml"], ["--serve", "8001", "run.yaml"]),
        (["--serve", "run.yaml"], ["--serve=0", "run.yaml"]),
        (["run.yaml", "--serve", "-n", "2"], ["run.yaml", "--serve=0", "-n", "2"]),
    ],
)
def test_the_port_may_be_left_out(given: list[str], read: list[str]) -> None:
    assert with_port(given) == read
