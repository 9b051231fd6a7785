"""Commands to the page: what is no command is a 400 and changes nothing, and no sequence of commands ends the run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paramserver.tests.cluster import Cluster
from paramserver.tests.web.conftest import CONTROL, SHOWN, Client

pytest.importorskip("starlette", reason="pip install 'paramserver[web]'")
from starlette.testclient import TestClient

from paramserver.web.app import Runs, make_app
from paramserver.web.stored import Store

SET_SCALE = b'{"do": "set", "name": "lr_scale", "value": %s}'
BAD = {
    "nested lists": b"[" * 60_000,
    "nested objects": b'{"do":' * 10_000,
    "a nested value": b'{"do": "set", "name": "lr_scale", "value": ' + b"[" * 900 + b"]" * 900 + b"}",
    "a nested rank": b'{"do": "pause", "rank": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
    "half a pair": b'{"do": "\\ud800"}',
    "half a pair as a name": b'{"do": "set", "name": "\\udfff", "value": 1}',
    "half a pair as a value": b'{"do": "set", "name": "mode", "value": "a\\ud800"}',
    "half a pair as a key": b'{"do": "drain", "\\ud800": 1}',
    "half a pair, encoded": b'{"do": "\xed\xa0\x80"}',
    "400 digits": SET_SCALE % (b"9" * 400),
    "4,000 digits": SET_SCALE % (b"9" * 4000),
    "50,000 digits": SET_SCALE % (b"9" * 50_000),
    "infinity": SET_SCALE % b"1e999",
    "Infinity": SET_SCALE % b"-Infinity",
    "NaN": SET_SCALE % b"NaN",
    "a huge rank": b'{"do": "pause", "rank": %s}' % (b"9" * 100),
}


def test_no_command_ends_the_run(cluster: Cluster) -> None:
    """With a snapshot after each: what was set is a part of it."""
    server = cluster.server(
        "--mode", "ssp", "--task", "xor", "--steps", "1000000", "--web", "127.0.0.1:0",
        "--checkpoint-dir", "snapshots", "--history", "h.jsonl", PS_WEB_TOKEN="secret",
    )  # fmt: skip
    page, worker = Client(server.event("dashboard")["address"]), cluster.worker(0)

    def asks(body: bytes) -> int:
        return page.ask("POST", CONTROL, body, **SHOWN)[0]

    def snapshot() -> None:
        before = len(server.events("snapshot"))
        assert asks(b'{"do": "snapshot"}') == 200
        server.until(lambda: len(server.events("snapshot")) > before, "snapshot")

    server.until(lambda: bool(server.events("admitted")), "worker")
    assert {name: asks(body) for name, body in BAD.items()} == dict.fromkeys(BAD, 400)
    for name, value in (("staleness", 5), ("lr_scale", 0.5), ("staleness", 4), ("lr_scale", 1), ("staleness", 3)):
        assert asks(json.dumps({"do": "set", "name": name, "value": value}).encode()) == 200
        snapshot()
    set_mode = b'{"do": "set", "name": "mode", "value": "async"}'
    scales = (SET_SCALE % b"1e300", SET_SCALE % b"9007199254740993")
    for body in (b'{"do": "pause", "rank": 2147483648}', set_mode, *scales, b"{}"):
        assert asks(body) == 422
    for path in ("", "/status", "/events", "/snapshots", "/workers", "/metrics"):
        assert page.ask("GET", f"/api/runs/live{path}")[0] == 200
    assert asks(b'{"do": "drain"}') == 200
    assert [process.wait() for process in (worker, server)] == [0, 0], server.output
    done = [line for line in (cluster.folder / "h.jsonl").read_text().splitlines() if '"op":"control"' in line]
    assert sum('"done":true' in line for line in done) == 11, done


def test_a_dashboard_without_a_run_of_its_own_begins_with_the_list(tmp_path: Any) -> None:
    runs = Runs(Store(tmp_path / "runs.sqlite"))
    client = TestClient(make_app(runs))
    assert "<title>paramserver</title>" in client.get("/").text
    runs.is_list = True
    reply = client.get("/", follow_redirects=False)
    assert (reply.status_code, reply.headers["location"]) == (307, "/runs")
    assert "<title>paramserver</title>" in client.get("/?run=abc").text
