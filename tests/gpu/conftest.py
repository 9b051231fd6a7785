"""Tests that need a GPU: `make gpu-test` runs them, and `make gpu-test DEVICE=cpu` tries their logic without one.

On a machine without CUDA each is skipped, and the reason is printed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from paramserver.tests.cluster import Cluster

HERE = Path(__file__).parent
VARIABLE = "GPU_TEST_DEVICE"  # cuda, or cpu: the dry run


def why_not(device: str) -> str:
    """Why nothing can run on this device; empty where something can."""
    if device == "cpu" or torch.cuda.is_available():
        return ""
    built = torch.version.cuda or torch.version.hip
    why = f"its CUDA {built} finds no GPU" if built else "it is built without CUDA"
    return f"NOT RUN: torch {torch.__version__} has no CUDA device ({why}); DEVICE=cpu tries the logic without one"


@pytest.fixture(scope="session")
def device() -> str:
    """`cuda`, or `cpu` in a dry run."""
    found = os.environ.get(VARIABLE, "cuda")
    if reason := why_not(found):
        pytest.skip(reason)
    return found


@pytest.fixture(scope="session")
def cuda(device: str) -> None:
    """For tests of what a CPU does not have."""
    if device != "cuda":
        pytest.skip("NOT RUN: a dry run on the CPU has no GPU's memory to look at")


def task(devices: str, precision: str = "float32") -> tuple[str, ...]:
    """The flags of the task of this folder."""
    sets = (f"--set=task.args.devices={devices}", f"--set=task.args.precision={precision}")
    return ("--task", f"{HERE / 'tasks.py'}:Checked", *sets)


def launched(cluster: Cluster, *flags: str, code: int = 0) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run ps-launch to its end; the summary, and the lines of all processes."""
    ran = cluster.command(
        "launch", "--no-store", "--summary", "summary.json", "--lr", "0.05", *flags, PS_LOG__FORMAT="json"
    )
    assert ran.returncode == code, f"exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    lines = [json.loads(line) for line in ran.stderr.splitlines() if line.startswith("{")]
    return json.loads((cluster.folder / "summary.json").read_text()), lines


def events(lines: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [line for line in lines if line.get("event") == name]
