"""Traces, with the real SDK over real sockets to a small collector: what hangs under what, and that nobody needs it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paramserver.tests.cluster import Cluster, end_well

STEPS = 20
RUN = ("--task", "xor", "--set", "task.args={num_samples: 2000}", "--workers", "2", "--steps", str(STEPS))


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Taker)
        self.spans: list[tuple[str, Any]] = []  # service, span
        self.url = f"http://127.0.0.1:{self.server_port}"

    def of(self, service: str, name: str) -> list[Any]:
        return [span for of, span in self.spans if (of, span.name) == (service, name)]


class Taker(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        payload = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            payload = gzip.decompress(payload)
        for resource in ExportTraceServiceRequest.FromString(payload).resource_spans:
            (service,) = (a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            self.server.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install 'paramserver[otel]'")
    found = Collector()
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_servers_spans_hang_under_the_workers_exchanges(cluster: Cluster, collector: Collector, mode: str) -> None:
    server = cluster.server("--mode", mode, *RUN, "--traces", collector.url)
    workers = [cluster.worker(rank, "--traces", collector.url) for rank in range(2)]
    end_well(*workers, server)
    exchanges = {(span.trace_id, span.span_id): span for span in collector.of("ps-worker", "exchange")}
    assert len(exchanges) == 2 * STEPS
    named = {
        (attributes(exchange)["paramserver.rank"], attributes(exchange)["paramserver.number"])
        for exchange in exchanges.values()
    }
    assert named == {(rank, number) for rank in range(2) for number in range(1, STEPS + 1)}
    for service, name in (
        ("ps-worker", "encode"), ("ps-worker", "wait"), ("ps-worker", "apply"),
        ("ps-server", "contribution"), ("ps-server", "apply"),
    ):  # fmt: skip
        spans = collector.of(service, name)
        assert len(spans) == 2 * STEPS, (service, name)
        for span in spans:
            above = exchanges[span.trace_id, span.parent_span_id]
            assert above.start_time_unix_nano <= span.start_time_unix_nano + 50_000_000, "clocks of one machine"
            assert span.start_time_unix_nano <= span.end_time_unix_nano
    contributions = {(span.trace_id, span.span_id): span for span in collector.of("ps-server", "contribution")}
    waits = collector.of("ps-server", "wait")
    assert all((span.trace_id, span.parent_span_id) in contributions for span in waits)
    assert bool(waits) == (mode == "sync")


def test_a_collector_that_is_not_there_costs_a_warning(cluster: Cluster) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install 'paramserver[otel]'")
    server = cluster.server("--mode", "async", *RUN, "--traces", "http://127.0.0.1:9")
    workers = [cluster.worker(rank) for rank in range(2)]
    end_well(*workers, server)
    (warning,) = server.events("traces_lost")
    assert warning["to"] == "http://127.0.0.1:9"
    assert "Traceback" not in server.output


@pytest.mark.slow
def test_off_it_is_not_imported(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "import paramserver.worker.api, paramserver.ps.server, paramserver.ps.observe.sinks\n"
        "from paramserver.common.config.schema import Config\n"
        "from paramserver.common.errors import UsageError\n"
        "paramserver.ps.observe.sinks.make_bus(Config())\n"
        "try:\n"
        "    paramserver.ps.observe.sinks.make_bus(Config.model_validate({'output': {'traces': 'http://x:1'}}))\n"
        "except UsageError as error: print(error.message, '|', error.fix)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "output.traces: opentelemetry is not installed | pip install 'paramserver[otel]'\n"
