"""`ps-bench` as a process; whatever it starts carries its mark in the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paramserver.tests.cluster import run_forked


class Bench:
    deadline_s = 110.0

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
        """A command that measures nothing, and so starts no process."""
        return run_forked(self.folder, "-m", "paramserver.benchmarks", *argv, environ={**os.environ, **env})

    def measure(self, line: str, **env: str) -> tuple[dict[str, Any], str]:
        """The JSON file and the table of a measurement that succeeds and leaves no process behind.

        The file says what was measured, when, where and with what.
        """
        # Settings of the user's mean nothing to a benchmark: this server address does not exist.
        process = self.start(*line.split(), "--json", "metrics.json", **{"PS_SERVER": "127.0.0.1:1", **env})
        output, errors = process.communicate(timeout=self.deadline_s)
        assert process.returncode == 0, errors
        assert self.left() == []
        report = json.loads((self.folder / "metrics.json").read_text())
        assert list(report) == ["what", "date", "machine", "versions", "config", "results"]
        assert report["what"] == line.split()[0] and report["date"].startswith("20")
        assert list(report["machine"]) == ["cores", "clock_mhz", "model"] and report["machine"]["cores"] >= 1
        assert all(report["versions"][name] for name in ("torch", "grpcio", "python"))
        return report, output

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


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for process in bench.left():
        process.kill()
