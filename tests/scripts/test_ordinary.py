"""Scripts as people write them, by two workers in sync and by one plain process with the union batch: the same weights.

A rank's batch k is every second sample of the plain process' batch k of twice the size, so the mean of the two
gradients is the plain one's. In double precision, because optimizers amplify what rounding leaves.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paramserver.tests.cluster import Cluster, Process, end_well

HERE = Path(__file__).parent / "ordinary"
BATCH = 10
# How often each steps its optimizer.
STEPS = {
    "unfreezing": 12, "early_stopping": 400, "mixed": 8, "language_model": 12, "fine_tuning": 15, "sparse": 10,
}  # fmt: skip


def plain(script: Path, folder: Path, **more: str) -> dict[str, torch.Tensor]:
    """By one process, without a server, of the union batch."""
    out = folder / "plain.pt"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PS_", "RANK", "WORLD_SIZE"))}
    environ |= {"BATCH": str(2 * BATCH), "OUT": str(out), "OMP_NUM_THREADS": "1", **more}
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return torch.load(out)


def assert_near(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], rtol: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, rtol=rtol, atol=1e-9), name


def together(cluster: Cluster, script: Path, *flags: str, **more: str) -> tuple[Process, dict[str, torch.Tensor]]:
    """By two workers in sync; also their server, which has ended."""
    server, out = cluster.server("--mode", "sync", "--workers", "2", *flags), cluster.folder / "together.pt"
    scripts = [cluster.script(rank, script, BATCH=str(BATCH), OUT=str(out), **more) for rank in range(2)]
    end_well(*scripts, server)
    assert all("Traceback" not in script.output for script in (*scripts, server))
    return server, torch.load(out)


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(STEPS))
def test_two_workers_in_sync_are_one_process_with_the_union_batch(cluster: Cluster, tmp_path: Path, script: str):
    path = HERE / f"{script}.py"
    _, found = together(cluster, path, "--steps", str(STEPS[script]))
    assert_near(found, plain(path, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"MOMENTUM": "1"}, {}])
def test_branches_without_a_gradient_and_a_clipped_mean(cluster: Cluster, tmp_path: Path, more: dict[str, str]):
    """The plain process clips its gradient, the server the mean of the workers', and neither decays a branch that was
    not in the loss."""
    path = HERE / "branches.py"
    _, found = together(cluster, path, "--steps", "14", "--clip-norm", "0.1", **more)
    assert_near(found, plain(path, tmp_path, CLIP="0.1", **more))
