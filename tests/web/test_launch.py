"""`ps-launch --web`: the page of a job, what eviction means to it, and the same address after a server's death."""

from __future__ import annotations

import json
import re
import urllib.request
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError

import psutil
import pytest

from paramserver.drills.check import check
from paramserver.simulate.recorded.replay import read_trace, replay
from paramserver.tests.cluster import DEADLINE_S, Cluster, Process

pytest.importorskip("starlette", reason="pip install 'paramserver[web]'")


def address_of(job: Process) -> str:
    job.until(lambda: "the dashboard: http" in job.output, "page")
    found = re.search(r"the dashboard: http://(127\.0\.0\.1:\d+)/", job.output)
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


def long_job(cluster: Cluster, *flags: str) -> tuple[Process, str]:
    """With a page, whose address it returns, and snapshots."""
    job = cluster.start(
        "job", "-m", "paramserver.launch", "-n", "2", "--task", "digits", "--steps", "100000", "--web", *flags,
        "--history", "history.jsonl", "--checkpoint-dir", "snapshots", "--checkpoint-every", "20", "--set",
        "slowdown.base_s=0.01", "--set", "server.status_interval_s=0.1", PS_WEB_TOKEN="secret", PS_LOG__FORMAT="text",
    )  # fmt: skip
    return job, address_of(job)


def kill_server_of(job: Process) -> None:
    """Returns once the next one has its page."""
    children = psutil.Process(job.popen.pid).children(recursive=True)
    (server,) = [child for child in children if any("paramserver.ps" in part for part in child.cmdline())]
    server.kill()
    job.until(lambda: job.output.count("the dashboard: http") == 2, "second page")


def check_history(path: Path) -> None:
    """Nothing lost, nothing twice; and the same orders at the same places lead to the same decisions."""
    assert check({"history": path.read_bytes().splitlines(keepends=True)}).problems == []
    verdict = replay(read_trace(str(path)), {})
    assert (verdict.problem, verdict.decided) == (None, "")


@pytest.mark.slow
def test_a_job_with_a_page(cluster: Cluster, tmp_path: Path) -> None:
    job, address = long_job(cluster, "--mode", "async")
    until_beyond(job, address, 30)
    kill_server_of(job)
    assert job.output.count(address) >= 2  # where it was
    until_beyond(job, address, 60)
    assert any("connection_lost" in line for line in ask(address, "/api/runs/live/workers/1/log")["lines"])
    assert "worker 1 is evicted" in ask(address, "/api/runs/live/controls", {"do": "evict", "rank": 1})["done"]
    until_beyond(job, address, step_of(address) + 20)
    with pytest.raises(HTTPError):
        ask(address, "/api/runs/live/controls", {"do": "pause", "rank": 1})
    ask(address, "/api/runs/live/controls", {"do": "pause", "rank": 0})
    job.until(lambda: "a user paused" in str(ask(address, "/api/runs/live/workers")), "waits for a resume")
    ask(address, "/api/runs/live/controls", {"do": "resume", "rank": 0})
    ask(address, "/api/runs/live/controls", {"do": "drain"})
    assert job.wait() == 0, job.output
    check_history(tmp_path / "history.jsonl")
    assert "restart 1 of 3" not in job.output.partition("evicted")[2]


@pytest.mark.slow
def test_runs_one_after_another_have_their_page_at_one_address(cluster: Cluster) -> None:
    """Whoever has it open sees the next one; a mode without a server has none, and that is said."""
    job = cluster.start(
        "job", "-m", "paramserver.launch", "-n", "1", "--mode", "single,async,sync", "--task", "xor", "--steps", "20",
        "--web", PS_WEB_TOKEN="secret", PS_LOG__FORMAT="text",
    )  # fmt: skip
    assert job.wait() == 0, job.output
    assert "single has no server, and so no dashboard" in job.output
    found = re.findall(r"the dashboard: http://(127\.0\.0\.1:\d+)/", job.output)
    assert len(found) == 2 and len(set(found)) == 1


def test_a_worker_alone_has_no_page(cluster: Cluster) -> None:
    result = cluster.command("launch", "--mode", "single", "--web", "--task", "xor", "--steps", "5")
    assert result.returncode == 2
    assert "--web: there is no server and no dashboard" in result.stderr


@pytest.mark.slow
def test_another_bound_holds_while_workers_train(cluster: Cluster, tmp_path: Path) -> None:
    """Also over the server's death; the history is checked by whichever bound held, and replayed."""
    job, address = long_job(cluster, "--mode", "ssp", "--set", "policy.staleness=3")
    until_beyond(job, address, 10)
    done = ask(address, "/api/runs/live/controls", {"do": "set", "name": "staleness", "value": 1})["done"]
    assert done == "staleness is 1, was 3"
    step = step_of(address) + 40  # a snapshot and more
    until_beyond(job, address, step)
    kill_server_of(job)
    until_beyond(job, address, step + 40)  # all are back
    assert ask(address, "/api/runs/live")["about"]["settings"]["policy"]["staleness"] == 1
    ask(address, "/api/runs/live/controls", {"do": "drain"})
    assert job.wait() == 0, job.output
    check_history(tmp_path / "history.jsonl")


@pytest.mark.slow
def test_who_was_evicted_stays_out_when_the_servers_go_back(cluster: Cluster) -> None:
    """A shard is killed after the eviction, and all go back to a snapshot from before it."""
    flags = ("--mode", "async", "--checkpoint-dir", "snapshots", "--set", "server.lease_s=5")
    server = cluster.server(
        *flags, "--shards", "2", "--workers", "2", "--steps", "100000", "--web", "127.0.0.1:0",
        "--set", "server.status_interval_s=0.1", PS_WEB_TOKEN="secret",
    )  # fmt: skip
    shard = cluster.shard(1, 2, *flags)
    workers = [cluster.worker(rank, "--task", "digits", "--set", "slowdown.base_s=0.01") for rank in range(2)]
    address = server.event("dashboard")["address"]
    until_beyond(server, address, 20)
    assert "worker 1 is evicted" in ask(address, "/api/runs/live/controls", {"do": "evict", "rank": 1})["done"]
    assert workers[1].wait() == 13
    shard.popen.kill()
    shard.wait()
    server.until(lambda: bool(server.events("shard_lost")), "loss of the shard")
    shard = cluster.shard(1, 2, *flags)
    server.until(lambda: bool(server.events("resumed")), "return to the snapshot")
    assert cluster.worker(1, "--task", "digits").wait() == 13
    until_beyond(server, address, 20)  # nobody waits for rank 1
    ask(address, "/api/runs/live/controls", {"do": "drain"})
    assert [process.wait() for process in (workers[0], server, shard)] == [0, 0, 0], server.output
