"""What the page says of one thing in two places is the same: states, waits, snapshots, settings, numbers of workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from paramserver.common.reporting.summary import Snapshot, View
from paramserver.common.runstore.reading import RunStore
from paramserver.tests.cluster import Cluster, Process
from paramserver.tests.web.conftest import CONTROL, SHOWN, Client, Tab, about, tick

pytest.importorskip("starlette", reason="pip install 'paramserver[web]'")

from paramserver.web.stored import Store

OFTEN = ("--set", "server.status_interval_s=0.1")


def served(cluster: Cluster, *flags: str) -> tuple[Process, Client]:
    server = cluster.server(
        "--task", "xor", "--steps", "1000000", "--web", "127.0.0.1:0", *OFTEN, *flags, PS_WEB_TOKEN="secret"
    )
    return server, Client(server.event("dashboard")["address"])


def newest(client: Client) -> dict[str, Any]:
    found = client.ask("GET", "/api/runs/live/status")[1]
    return found if isinstance(found, dict) else {}


def asks(client: Client, **order: Any) -> None:
    assert client.ask("POST", CONTROL, json.dumps(order).encode(), **SHOWN)[0] == 200


def test_who_computes_is_not_said_to_wait_and_who_waits_is_said_to(cluster: Cluster) -> None:
    server, client = served(cluster, "--mode", "async", "--workers", "2")
    workers = [cluster.worker(rank, "--set", "slowdown.base_s=0.3") for rank in range(2)]
    server.until(lambda: newest(client).get("status", {}).get("step", 0) > 2, "steps")
    seen: list[list[str]] = []

    def is_seen() -> bool:
        now = newest(client)
        seen.append([worker["state"] for worker in now["status"]["workers"]])
        named = {wait["rank"] for wait in now["waits"]}
        assert named == {worker["rank"] for worker in now["status"]["workers"] if worker["state"] == "waiting"}, now
        return now["status"]["step"] > 8

    server.until(is_seen, "more steps")
    assert ["computing", "computing"] in seen
    asks(client, do="pause", rank=1)
    server.until(lambda: bool(newest(client)["waits"]), "a worker that waits")
    now = newest(client)
    assert [(wait["rank"], wait["why"]) for wait in now["waits"]] == [(1, "a resume: a user paused this worker")]
    assert [worker["state"] for worker in now["status"]["workers"] if worker["rank"] == 1] == ["waiting"]
    asks(client, do="drain")
    assert [worker.wait() for worker in (*workers, server)] == [0, 0, 0], server.output


@pytest.mark.slow
def test_what_was_set_is_what_is_said(cluster: Cluster) -> None:
    """Also on record, in the dashboard, and in Prometheus' labels."""
    server, client = served(cluster, "--mode", "ssp", "--workers", "2", "--set", "output.track_dir=runs")
    workers = [cluster.worker(rank, "--set", "slowdown.base_s=0.01") for rank in range(2)]
    server.until(lambda: newest(client).get("status", {}).get("step", 0) > 1, "steps")
    assert client.ask("GET", "/api/runs/live")[1]["about"]["label"].startswith("ssp (staleness 3, ")
    asks(client, do="set", name="staleness", value=7)
    asks(client, do="set", name="lr_scale", value=0.5)
    about = client.ask("GET", "/api/runs/live")[1]["about"]
    assert about["label"].startswith("ssp (staleness 7, ")
    assert (about["lr_scale"], about["settings"]["policy"]["staleness"]) == (0.5, 7)
    step = newest(client)["status"]["step"]
    server.until(lambda: newest(client)["status"]["step"] > step + 20, "more steps")
    asks(client, do="drain")
    assert [worker.wait() for worker in (*workers, server)] == [0, 0, 0], server.output
    store = Store(cluster.folder / "runs/paramserver.db")
    (line,) = store.runs()
    assert (line.mode, line.num_workers, line.state) == ("ssp", 2, "stopped")
    view = store.view(line.id)
    assert view is not None and view.newest is not None
    assert (view.newest.status.mode, view.newest.status.num_workers) == ("ssp", 2)


@pytest.mark.slow
def test_who_waited_on_record_is_named(cluster: Cluster) -> None:
    """A run that another process serves, and one that was lost."""
    server, client = served(cluster, "--mode", "async", "--workers", "2", "--set", "output.track_dir=runs")
    for rank in range(2):
        cluster.worker(rank, "--set", "slowdown.base_s=0.01")
    server.until(lambda: newest(client).get("status", {}).get("step", 0) > 1, "steps")
    asks(client, do="pause", rank=0)
    path = cluster.folder / "runs/paramserver.db"

    def is_kept() -> bool:
        with RunStore(path) as store:
            return "a resume" in store.runs()[0].waiting

    server.until(is_kept, "a wait on record")
    server.kill()
    store = Store(path)
    view = store.view(store.runs()[0].id)
    assert view is not None and view.newest is not None
    assert [(wait.rank, wait.why) for wait in view.newest.waits] == [(0, "a resume: a user paused this worker")]


@pytest.mark.parametrize(
    ("version", "kept", "message"),
    [(None, [], "none"), (0, [Snapshot(version=0, at=1.7e9, path="snapshots/0")], "version 0")],
)
def test_the_page_has_the_same(
    page: Any, tab: Callable[..., Tab], version: int | None, kept: list[Snapshot], message: str
) -> None:
    page.begin(View(about=about(mode="ssp", label="ssp (staleness 3)")))
    page.push(tick(1, durable_version=version, snapshots=kept))
    shown = tab()
    shown.page.goto(f"http://{page.address}/")
    shown.page.locator("#snapshots").wait_for(state="visible" if kept else "hidden")
    shown.page.wait_for_function("said => document.querySelector('#more dd')?.textContent === said", arg=message)
    assert shown.page.locator("#title").text_content() == "digits · ssp (staleness 3)"
    page.retell(about(mode="ssp", label="ssp (staleness 9)", lr_scale=0.5))
    page.push(tick(2, durable_version=version))
    shown.page.wait_for_function("() => document.getElementById('title').textContent.includes('staleness 9')")
    assert "0.500 times" in shown.page.locator("#more").text_content()
    over = tick(3, durable_version=version, is_over=True)
    over.status.num_workers = 0
    page.push(over)
    shown.page.locator("#connection[data-state=over]").wait_for()
    assert shown.metric("workers") == "2"
