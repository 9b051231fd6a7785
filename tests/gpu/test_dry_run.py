"""`make gpu-test` without a GPU: one of its runs on the CPU, what it says where it cannot run, and its time limit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paramserver.tests.cluster import Cluster
from paramserver.tests.gpu import run as runner
from paramserver.tests.gpu.test_runs import run

RUNNER = Path(runner.__file__)


@pytest.mark.slow
def test_a_run_of_the_gpu_tests_on_the_cpu(cluster: Cluster) -> None:
    assert run(cluster, "cpu", "--mode", "sync")["version"] == 40


def test_an_interpreter_that_lacks_packages_is_told_which(tmp_path: Path) -> None:
    """Without its site-packages this interpreter has nothing."""
    command = [sys.executable, "-S", str(RUNNER), "--out", str(tmp_path), "--packages", str(tmp_path / "none")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 2 and "Traceback" not in ran.stderr
    for name in ("torch (none)", "grpcio (none)", "protobuf (none)", "pydantic (none)", "pytest (none)"):
        assert name in ran.stderr
    assert "nothing has run" in ran.stderr and "make gpu-packages" in ran.stderr


def test_the_checkout_is_importable_whatever_its_folder_is_called(tmp_path: Path) -> None:
    folder = runner.importable(tmp_path)
    assert folder == runner.importable(tmp_path)  # a second time too
    found = subprocess.run(
        [sys.executable, "-c", "import paramserver.common.version as found; print(found.__file__)"],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(folder)}, cwd=tmp_path,
    ).stdout  # fmt: skip
    assert found.strip() == str(folder / "paramserver/common/version.py")


def test_what_takes_too_long_is_ended() -> None:
    sleeper = [sys.executable, "-c", "import time\ntime.sleep(600)"]
    assert runner.within(sleeper, dict(os.environ), time.monotonic()) is None
    assert runner.within([sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ), time.monotonic() + 60) == 3
