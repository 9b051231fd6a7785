"""The real commands with tiny sizes: what they report is complete and possible. No figure is judged by its speed."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paramserver.benchmarks.model import synthetic_model
from paramserver.benchmarks.results import percentile

DEADLINE_S = 100.0


class Bench:
    """`ps-bench` as a process; whatever it starts carries its mark in the environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex

    def start(self, *argv: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "paramserver.benchmarks", *argv],
            env={**os.environ, "BENCH_TEST_MARK": self.mark, **env},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*argv, **env)
        out, err = process.communicate(timeout=DEADLINE_S)
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def left(self) -> list[psutil.Process]:
        """Processes with the mark that still run."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("BENCH_TEST_MARK") == self.mark and process.status() != "zombie":
                    found.append(process)
            except psutil.Error:
                pass
        return found


class Measurement(Bench):
    """A measurement in the background: most of its time is the loading of torch, so all are started at once."""

    def __init__(self, folder: Path, *argv: str, **env: str) -> None:
        super().__init__(folder)
        self.process = self.start(*argv, "--json", "figures.json", **env)

    def result(self) -> tuple[dict[str, Any], str]:
        """The JSON file and the table of a run that succeeds and leaves no process behind."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == 0, err
        assert self.left() == []
        return json.loads((self.folder / "figures.json").read_text()), out


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Measurement]]:
    # Settings of the user's mean nothing to a benchmark: this server address does not exist.
    lines = {
        "exchange": "exchange --mb 1 --runs 2 --mode bsp --codec bf16",
        "latency": "latency --exchanges 50 --optimizer adam",
        "memory": "memory --mb 8 --workers 1",
    }
    started = {
        what: Measurement(tmp_path_factory.mktemp(what), *line.split(), PS_SERVER="127.0.0.1:1")
        for what, line in lines.items()
    }
    yield started
    for measurement in started.values():
        for process in measurement.left():
            process.kill()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for process in bench.left():
        process.kill()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["exchange", "--mb", "0"], "--mb"),
        (["exchange", "--mode", "snyc"], "did you mean 'sync'?"),
        (["exchange", "--codec", "zip"], "unknown codec 'zip'"),
        (["latency", "--exchange", "10"], "--exchanges"),
    ],
)
def test_a_wrong_flag_is_refused_before_anything_starts(bench: Bench, argv: list[str], words: str) -> None:
    done = bench.run(*argv)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_help_loads_no_torch(bench: Bench) -> None:
    names = (
        "import sys; from paramserver.benchmarks import main; print([n for n in ('torch', 'grpc') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", names], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout.strip() == "[]"
    out = bench.run("--help").stdout
    assert out.index("Examples") < out.index("Commands")


def test_sigterm_stops_the_server_too(bench: Bench) -> None:
    process = bench.start("memory", "--mb", "1000")
    deadline = time.monotonic() + DEADLINE_S
    while len(bench.left()) < 2:
        assert time.monotonic() < deadline, "no server was started"
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143
    assert bench.left() == []


@pytest.mark.parametrize("num_floats", [1, 11, 203, 250_000, 1_000_003])
def test_a_synthetic_model_has_exactly_the_size_asked_for(num_floats: int) -> None:
    model = synthetic_model(num_floats)
    assert sum(parameter.numel() for parameter in model) == num_floats
    assert len(model) <= 200


def test_percentiles() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.9), percentile(values, 0.99), percentile([5.0], 0.99)) == (90.0, 99.0, 5.0)


def check_origin(report: dict[str, Any], what: str) -> None:
    assert list(report) == ["what", "date", "machine", "versions", "config", "results"]
    assert report["what"] == what
    assert list(report["machine"]) == ["cores", "clock_mhz", "model"]
    assert report["machine"]["cores"] >= 1
    assert all(report["versions"][name] for name in ("torch", "grpcio", "python"))
    assert report["date"].startswith("20")


def test_exchange(started: dict[str, Measurement]) -> None:
    report, table = started["exchange"].result()
    check_origin(report, "exchange")
    assert report["config"] == {
        "mb": 1, "runs": 2, "mode": "sync", "optimizer": "sgd", "codec": "bf16",
        "num_floats": 250_000, "workers": 1, "warmup": 3,
    }  # fmt: skip
    found = report["results"]
    assert found["size_mb"] == 1.0
    assert found["sent_mb"] == 0.5
    assert all(math.isfinite(value) and value >= 0 for value in found.values())
    for part in ("total", "up", "held", "down"):
        assert 0 < found[f"{part}_best_ms"] <= found[f"{part}_ms"]
    for part, num_mb in (("up", 0.5), ("down", 1.0)):
        assert found[f"{part}_gb_s"] == pytest.approx(num_mb / found[f"{part}_ms"], rel=0.01)
    # In every single exchange the parts are within the whole.
    assert found["held_best_ms"] + found["down_best_ms"] < found["total_ms"] * 1.01
    assert "GB/s" in table


def test_latency(started: dict[str, Measurement]) -> None:
    report, table = started["latency"].result()
    check_origin(report, "latency")
    assert report["config"]["payload_bytes"] == 203 * 4
    exchange, ping, ratio = (report["results"][name] for name in ("exchange", "ping", "ratio"))
    for figures in (exchange, ping):
        assert 0 < figures["best_us"] <= figures["median_us"] <= figures["p90_us"] <= figures["p99_us"]
    assert ratio["median_us"] == pytest.approx(exchange["median_us"] / ping["median_us"], rel=0.01)
    assert "bare gRPC ping-pong" in table


def test_memory(started: dict[str, Measurement]) -> None:
    report, table = started["memory"].result()
    check_origin(report, "memory")
    found = report["results"]
    # Parameters, twice that for Adam, a mean, one upload (there is one worker), a reply.
    assert found["expected_mb"] == 8 * (1 + 2 + 1 + 1 + 1)
    assert found["model_mb"] == pytest.approx(found["peak_mb"] - found["before_mb"], abs=0.2)
    assert found["model_mb"] > 8 * (1 + 2 + 1), "less than what it certainly holds"
    assert "server's peak" in table
