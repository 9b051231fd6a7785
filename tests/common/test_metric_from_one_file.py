"""A metric that only this file declares is in everything that displays metrics."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from paramserver.catalog.showing import show_run
from paramserver.common.config.schema import Config
from paramserver.common.reporting.metrics import OF_RUN, OF_WORKER, Fold, Metric, Unit, register
from paramserver.common.reporting.report import TerminalConsole, report_console, status_panel, summary_table
from paramserver.common.reporting.summary import About, Status, Summary, Tick, View
from paramserver.common.runstore.reading import RunStore
from paramserver.common.runstore.record import Record
from paramserver.ps.core.counting import WorkerStats
from paramserver.ps.engine.engine import Engine
from paramserver.ps.engine.modes import policy_of
from paramserver.ps.observe import reports
from paramserver.ps.observe.metrics import MetricsSink
from paramserver.ps.observe.trackers.base import metrics_of
from paramserver.simulate.results.summary import summary as summary_of
from paramserver.tests.simulate.worlds import simulated
from paramserver.web.stored import write_report

pytest.importorskip("starlette", reason="pip install 'paramserver[web]'")
from starlette.testclient import TestClient

from paramserver.web.app import Runs, make_app
from paramserver.web.feed import Feed
from paramserver.web.stored import Store


def record_in(folder: Path) -> Record:
    return Record(Config.model_validate({"output": {"track_dir": str(folder)}}), run="a" * 12, mode="async")


@pytest.fixture(autouse=True)
def crumbs() -> Iterator[None]:
    """The whole declaration."""
    register(
        Metric("crumb_s", "crumbs", "Seconds in which crumbs fell.", Unit.SECONDS, over_workers=Fold.SUM,
               over_time=Fold.SUM, read=lambda worker: 2.5 * worker.stats.dropped + worker.traffic.num_peers)
    )  # fmt: skip
    yield
    del OF_WORKER["crumb_s"], OF_RUN["crumb_s"]


def taken() -> tuple[Status, Summary, str]:
    """Of a server with two ranks that have 2.5 and 5 seconds: status, summary, and the text for Prometheus."""

    async def main() -> tuple[Status, Summary, str]:
        engine = Engine(Config(), policy_of("async", {}), name="run")
        sink = MetricsSink("127.0.0.1:0")
        try:
            sink.begin(engine)
            engine.run.roster.stats.update({rank: WorkerStats(rank, dropped=rank + 1) for rank in range(2)})
            _, ranks = await sink.read()
            registry = CollectorRegistry(auto_describe=False)
            registry.register(type("Ranks", (), {"collect": lambda self: sink.of_ranks(ranks)})())
            return reports.status(engine), reports.summary(engine), generate_latest(registry).decode()
        finally:
            sink.close()
            engine.close()

    return asyncio.run(main())


def test_a_server_has_it_and_prometheus() -> None:
    status, summary, text = taken()
    assert [worker.crumb_s for worker in status.workers] == [2.5, 5.0] and status.crumb_s == 7.5
    assert Status.parse(json.loads(json.dumps(status.fields()))) == status
    assert json.loads(summary.text())["crumb_s"] == 7.5
    assert "# HELP paramserver_worker_crumb_seconds_total Seconds in which crumbs fell." in text
    assert 'paramserver_worker_crumb_seconds_total{rank="1"} 5.0' in text


def test_a_simulation_has_it() -> None:
    assert [worker.crumb_s for worker in summary_of(simulated("sync", 2, 3)).workers] == [0.0, 0.0]


def test_trackers_and_terminal_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    status, summary, _ = taken()
    found = metrics_of(status)
    assert (found["train/crumb_s"], found["worker1/crumb_s"]) == (7.5, 5.0)
    report_console().print(summary_table(summary))
    console = TerminalConsole()
    with console.capture() as shown:
        console.print(status_panel(status))
    assert all("crumbs" in text and "5.0" in text for text in (capsys.readouterr().out, shown.get()))


def test_the_page_has_it() -> None:
    status, _, _ = taken()
    view = View(about=About(run="r1"))
    view.add(Tick(at=1.0, status=status))
    runs = Runs(Store(Path("nowhere")))
    runs.begin(Feed(view), 0)
    client = TestClient(make_app(runs))
    assert [worker["crumb_s"] for worker in client.get("/api/runs/r1/workers").json()] == [2.5, 5.0]
    assert client.get("/api/runs/r1/status").json()["status"]["crumb_s"] == 7.5
    assert client.get("/api/runs/r1/metrics").json()["crumb_s"] == [7.5]
    described = {"name": "crumb_s", "label": "crumbs", "help": "Seconds in which crumbs fell.", "unit": "seconds",
                 "is_rare": False}  # fmt: skip
    assert all(described in client.get("/api/metrics").json()[scope] for scope in ("run", "worker"))


def test_the_run_store_has_it_also_in_a_file_that_is_older(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "paramserver.db"
    declared, _ = OF_WORKER.pop("crumb_s"), OF_RUN.pop("crumb_s")
    record_in(tmp_path).write()
    register(declared)
    status, summary, _ = taken()
    record = record_in(tmp_path)
    record.add(Tick(at=time.time(), status=status))
    record.end(Tick(at=time.time(), status=status), summary, "")
    with RunStore(path) as store:
        (run,) = store.runs()
        assert run.crumb_s == store.series(run)[-1].crumb_s == 7.5
        assert [worker.crumb_s for worker in store.worker_series(run)[-2:]] == [2.5, 5.0]
    capsys.readouterr()  # lines of the log
    show_run(path, "last", as_json=True)
    assert json.loads(capsys.readouterr().out)["worker_series"][-1]["crumb_s"] == 5.0
    show_run(path, "last", as_json=False)
    assert "crumbs" in capsys.readouterr().out


def test_reports_and_notebooks_have_it(tmp_path: Path) -> None:
    _, summary, _ = taken()
    write_report(str(tmp_path), "two runs", [("a", summary), ("b", summary)])
    assert all("crumbs" in (tmp_path / name).read_text() for name in ("report.html", "report.md"))
    shown = summary._repr_mimebundle_()
    assert "crumbs 7.5" in shown["text/plain"] and "<th scope=col style='text-align:right'>crumbs" in shown["text/html"]
