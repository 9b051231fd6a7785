"""The rig of `make overlap` works: two runs over a slow link, counted exactly. Times are measured there, not here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paramserver.tests.hosts import EXIT_SKIPPED

MEASURE = Path(__file__).with_name("measure.py")


@pytest.mark.slow
def test_both_variants_run_over_a_slow_link() -> None:
    small = ("--workers", "2", "--steps", "6", "--hidden", "512", "--compute-s", "0.02")
    argv = [sys.executable, str(MEASURE), "--json", "--repeats", "1", "--mode", "ssp", *small]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as rig:
        try:
            out, err = rig.communicate(timeout=200)
        finally:
            rig.terminate()  # it takes its namespaces and processes with it
    if rig.returncode == EXIT_SKIPPED:
        pytest.skip(err.strip())
    assert rig.returncode == 0, err
    (metrics,) = json.loads(out)
    assert metrics["plain_contributions"] == metrics["changed_contributions"]
    assert metrics["plain_samples"] == metrics["changed_samples"] == [6 * 8] * 2
    assert metrics["changed_staleness_max"] >= 1
    # The same messages, but for what a changed header costs.
    assert metrics["changed_bytes_sent"] == pytest.approx(metrics["plain_bytes_sent"], abs=1000)
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"psh{rig.pid % 100_000}-" not in left
