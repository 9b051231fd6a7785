"""The Grafana dashboard: a real Prometheus that scrapes a live server replies every query of it."""

from __future__ import annotations

import json
import shutil
import socket
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from paramserver.tests.cluster import DEADLINE_S, Cluster

BOARD = Path(__file__).parents[3] / "docker/grafana/dashboards/paramserver.json"


def queries() -> list[str]:
    board = json.loads(BOARD.read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [expr.replace("$job", ".*") for expr in found]


def reply(port: int, query: str) -> list[dict]:
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as reply:
        return json.loads(reply.read())["data"]["result"]


def test_every_query_is_replied(cluster: Cluster) -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus on this machine: install prometheus")
    server = cluster.server(
        "--mode", "async", "--metrics", "127.0.0.1:0", "--steps", "1000000", "--checkpoint-dir", "s"
    )
    cluster.worker(0, "--task", "digits", "--set", "slowdown.base_s=0.01")
    target = urllib.parse.urlsplit(server.event("metrics")["url"]).netloc
    scrape = {"job_name": "paramserver", "static_configs": [{"targets": [target]}]}
    settings = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}
    (cluster.folder / "prometheus.yml").write_text(json.dumps(settings))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    argv = ("--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{port}")
    code = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
    prometheus = cluster.start("prometheus", "-c", code, program, *argv)
    prometheus.until(lambda: "Server is ready" in prometheus.output, "word that it is ready")
    left, deadline = queries(), time.monotonic() + DEADLINE_S
    assert len(left) > 20
    while left:  # rates need two scrapes
        left = [query for query in left if not reply(port, query)]
        assert time.monotonic() < deadline, f"no series for {left}"
        time.sleep(0.2)
