"""What workers' processes measure, what scripts record, and the logs of workers: from the process to the browser."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paramserver.common.errors import UsageError
from paramserver.common.reporting.metrics import mean_recorded
from paramserver.common.reporting.summary import Status, WorkerStatus
from paramserver.common.runstore.reading import RunStore
from paramserver.launch.plan.hosts import Child
from paramserver.launch.view import WorkerLogs
from paramserver.tests.cluster import Cluster
from paramserver.tests.common.test_metric_from_one_file import record_in
from paramserver.tests.web.conftest import SHOWN, Client, Tab, tick
from paramserver.worker.training import readings
from paramserver.worker.training.readings import Readings

pytest.importorskip("starlette", reason="pip install 'paramserver[web]'")

LOG = "/api/runs/live/workers/1/log"
SCRIPT = """
import torch, paramserver
session = paramserver.connect()
model = torch.nn.Linear(4, 1)
optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
while not session.is_done:
    optimizer.zero_grad()
    loss = (model(torch.randn(8, 4)) - torch.randn(8, 1)).square().mean()
    loss.backward()
    session.record(loss=loss.item(), num_samples=8, rank_times_two=2 * session.rank, heads=torch.tensor(4))
    optimizer.step()
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    monkeypatch.setenv("PS_WEB_LOGS", str(folder))
    return folder


# ---- measurements ------------------------------------------------------------------------------------


def test_a_server_has_what_processes_measure_and_scripts_record(cluster: Cluster) -> None:
    (cluster.folder / "script.py").write_text(SCRIPT)
    often = ("--set", "server.status_interval_s=0.1", "--set", "server.lease_s=2")
    flags = ("--mode", "async", "--workers", "2", "--steps", "100000000", "--web", "127.0.0.1:0", *often)
    server = cluster.server(*flags, PS_WEB_TOKEN="secret")
    for rank in range(2):
        cluster.script(rank, cluster.folder / "script.py")
    client = Client(server.event("dashboard")["address"])
    status: dict[str, Any] = {}

    def is_known() -> bool:
        found = client.ask("GET", "/api/runs/live/status")[1]
        status.update(found["status"] if isinstance(found, dict) else {})  # `null` before the first status
        workers = status.get("workers", [])
        return len(workers) == 2 and all(worker["cpu"] and worker["recorded"] for worker in workers)

    server.until(is_known, "measurements")
    for worker in status["workers"]:
        assert worker["learning_rate"] == 0.01 and worker["grad_norm"] > 0 and worker["memory_bytes"] > 10_000_000
        assert worker["recorded"] == {"rank_times_two": 2 * worker["rank"], "heads": 4.0}
        assert worker["gpu_bytes"] is None
    assert status["recorded"] == {"rank_times_two": 1.0, "heads": 4.0} and status["server_memory_bytes"] > 10_000_000
    series = client.ask("GET", "/api/runs/live/metrics")[1]
    assert series["recorded.heads"][-1] == 4.0 and len(series["recorded.heads"]) == len(series["step"])


def test_a_script_records_numbers_and_not_too_many() -> None:
    found = Readings()
    with pytest.raises(UsageError, match=r"session.record\(name=...\) is a str"):
        found.record({"name": "text"})
    with pytest.raises(UsageError, match=r"session.record\(pair=...\) is a Tensor"):
        found.record({"pair": torch.ones(2)})
    found.record({f"metric{at}": at for at in range(64)})
    with pytest.raises(UsageError, match="one metric too many"):
        found.record({"another": 1})
    found.record({"metric0": 7})
    assert found.taken()["recorded.metric0"] == 7.0


def test_norms_take_a_two_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, taken = [100.0], []

    def norm(gradients: list[torch.Tensor]) -> torch.Tensor:
        taken.append(clock[0])
        clock[0] += 0.1
        return torch.tensor(3.0)

    monkeypatch.setattr(readings.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", norm)
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    found = Readings()
    groups = [{"lr": torch.tensor(0.5), "params": [weight]}]
    for _ in range(60):
        if clock[0] >= found.note_at:  # as `Steps.stepped` does
            found.note_step(groups)
        clock[0] += 1.0
    groups.clear()  # the rate may be on a GPU, so the heartbeat's thread leaves it alone
    assert len(taken) == 3 and taken[1] - taken[0] >= 20
    assert (found.taken()["grad_norm"], found.taken()["learning_rate"]) == (3.0, 0.5)


def recorded(step: int) -> Status:
    workers = [WorkerStatus(rank=rank, learning_rate=0.1, recorded={"score": float(rank + step)}) for rank in range(2)]
    return Status(step=step, workers=workers, recorded=mean_recorded(workers))


def test_the_run_store_keeps_what_scripts_record(tmp_path: Path) -> None:
    path = tmp_path / "paramserver.db"
    record = record_in(tmp_path)
    for step in (1, 2):
        record.add(tick(step, status=recorded(step)))
    record.flush()
    record.close()
    with RunStore(path) as store:
        (run,) = store.runs()
        assert run.recorded == {"score": 2.5} and run.learning_rate == 0.1
        assert [point.recorded for point in store.series(run)] == [{"score": 1.5}, {"score": 2.5}]
        assert [worker.recorded["score"] for worker in store.newest_workers(run)] == [2.0, 3.0]


def test_what_scripts_record_is_drawn(looks: Callable[..., Tab]) -> None:
    shown = looks(*(tick(step, status=recorded(step)) for step in range(1, 4)))
    chart = shown.page.locator('[data-key="recorded.score"] .chart')
    chart.wait_for()
    label = "() => document.querySelector('[data-key=\"recorded.score\"] .chart').getAttribute('aria-label')"
    shown.page.wait_for_function(f"() => ({label})().includes('newest 3.5')")
    assert shown.cells("learning rate") == ["0.100", "0.100"]
    shown.page.locator("#chart-menu summary").click()
    shown.page.locator('#chart-menu input[value="learning_rate"]').check()
    shown.page.locator('[data-key="learning_rate"] canvas').wait_for()


# ---- logs ----------------------------------------------------------------------------------------------


def test_the_last_lines_of_each_worker_are_kept(folder: Path, client: Client) -> None:
    logs = WorkerLogs()
    for at in range(1001):
        logs.add(Child("worker", 1), f"line \x1b[31m{at}\x1b[0m <b>", None)
    logs.add(Child("server", 0), "of the server", None)
    assert [file.name for file in folder.iterdir()] == ["worker-1.log"]
    assert (folder / "worker-1.log").stat().st_size < 12_000
    status, body = client.ask("GET", LOG, **SHOWN)
    assert status == 200 and len(body["lines"]) == 200 and body["lines"][-1] == "line 1000 <b>"
    assert client.ask("GET", "/api/runs/live/workers/7/log", **SHOWN)[1] == {"lines": []}


def test_a_log_needs_the_token_and_is_said_not_to_be_there(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.ask("GET", LOG)[0] == 401
    monkeypatch.delenv("PS_WEB_LOGS", raising=False)
    status, body = client.ask("GET", LOG, **SHOWN)
    assert (status, body["error"]) == (404, "the log of this worker is not available here")


def test_a_row_opens_with_the_log(folder: Path, client: Client, page: Any, tab: Callable[..., Tab]) -> None:
    WorkerLogs().add(Child("worker", 1), "<i>hello</i>", None)
    shown = tab()
    shown.page.goto(f"http://{page.address}/?token=secret")
    opener = shown.page.get_by_role("button", name="log and details of worker 1")
    opener.click()
    shown.page.get_by_text("<i>hello</i>").wait_for()
    assert opener.get_attribute("aria-expanded") == "true"
    WorkerLogs().add(Child("worker", 1), "and more", None)
    page.push(tick(5))
    shown.page.get_by_text("and more").wait_for()
    opener.click()
    shown.page.locator("[data-details]").wait_for(state="detached")
    reader = tab()
    reader.page.goto(f"http://{page.address}/")
    reader.page.get_by_role("button", name="log and details of worker 0").click()
    reader.page.get_by_text("needs the token").wait_for()


# ---- what is now ------------------------------------------------------------------------------------

LASTING = """
import sys, pathlib, torch, paramserver
session = paramserver.connect()
model = torch.nn.Linear(4, 1)
optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
while not session.is_done and not pathlib.Path(f"end-{session.rank}").exists():
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    session.record(loss=float(session.rank), num_samples=8)
    optimizer.step()
session.finish()
"""


def lasting_run(cluster: Cluster, mode: str, num: int) -> tuple[list[Any], Callable[..., Any]]:
    """The workers of a run, and a function that waits until the status fulfils a condition, and returns it."""
    (cluster.folder / "script.py").write_text(LASTING)
    often = ("--set", "server.status_interval_s=0.1", "--set", "server.lease_s=600")
    flags = ("--mode", mode, "--workers", str(num), "--steps", "100000000", "--web", "127.0.0.1:0", *often)
    server = cluster.server(*flags)
    workers = [cluster.script(rank, cluster.folder / "script.py") for rank in range(num)]
    client = Client(server.event("dashboard")["address"])

    def until(condition: Callable[[Any], bool], description: str) -> Any:
        found: list[Any] = []

        def holds() -> bool:
            tick = client.ask("GET", "/api/runs/live/status")[1]
            if isinstance(tick, dict) and len(tick["status"]["workers"]) == num:
                found[:] = [tick["status"]]
            return bool(found) and condition(found[0])

        server.until(holds, description)
        return found[0]

    return workers, until


def test_stopped_killed_and_finished_workers_leave_the_numbers_of_now(cluster: Cluster) -> None:
    workers, until = lasting_run(cluster, "async", 3)
    rates = lambda status: [worker["samples_per_s"] for worker in status["workers"]]  # noqa: E731
    begun = until(lambda status: min(rates(status)) > 0 and status["loss"] == 1.0, "all to train")
    workers[1].signal(signal.SIGSTOP)
    stopped = until(lambda status: rates(status)[1] < rates(begun)[1] / 4, "the rate of the stopped worker to decay")
    assert stopped["samples_per_s"] == pytest.approx(sum(rates(stopped)), abs=0.1)
    assert stopped["workers"][1]["state_s"] > 0
    workers[2].kill()
    killed = until(lambda status: status["workers"][2]["state"] == "gone", "the killed worker to be gone")
    assert (killed["loss"], rates(killed)[2], killed["workers"][2]["cpu"]) == (0.5, 0, None)
    workers[1].signal(signal.SIGCONT)
    (cluster.folder / "end-1").touch()
    left = until(lambda status: status["workers"][1]["state"] in ("finished", "gone"), "a worker to finish")
    assert (left["loss"], rates(left)[1]) == (0.0, 0)
    assert left["samples"] == sum(worker["samples"] for worker in left["workers"])
