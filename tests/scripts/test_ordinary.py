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

from paramserver.tests.cluster import Cluster

HERE = Path(__file__).parent / "ordinary"
BATCH = 10
# How often each steps its optimizer.
STEPS = {
    "unfreezing": 12, "early_stopping": 400, "mixed": 8, "epochs": 48, "language_model": 12, "fine_tuning": 15,
    "sparse": 10, "closure": 12,
}  # fmt: skip
FIRST = ("language_model",)


def plain(script: str, folder: Path, here: Path = HERE, **more: str) -> dict[str, torch.Tensor]:
    """By one process, without a server, of the union batch."""
    out = folder / "plain.pt"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PS_", "RANK", "WORLD_SIZE"))}
    environ |= {"BATCH": str(2 * BATCH), "OUT": str(out), "OMP_NUM_THREADS": "1", **more}
    done = subprocess.run(
        [sys.executable, str(here / f"{script}.py")], env=environ, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return torch.load(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in sorted(STEPS)]
)
def test_two_workers_in_sync_are_one_process_with_the_union_batch(cluster: Cluster, tmp_path: Path, script: str):
    wanted = plain(script, tmp_path)
    server = cluster.server("--mode", "sync", "--workers", "2", "--steps", str(STEPS[script]))
    out = tmp_path / "together.pt"
    scripts = [cluster.script(rank, HERE / f"{script}.py", BATCH=str(BATCH), OUT=str(out)) for rank in range(2)]
    assert [script.wait() for script in (*scripts, server)] == [0, 0, 0], scripts[0].output + scripts[1].output
    found = torch.load(out)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, rtol=1e-6, atol=1e-9), name
    assert all("Traceback" not in script.output for script in (*scripts, server))


@pytest.mark.parametrize("more", [pytest.param(more, marks=pytest.mark.slow) for more in ({"MOMENTUM": "1"}, {})])
def test_branches_without_a_gradient_and_a_clipped_mean(cluster: Cluster, tmp_path: Path, more: dict[str, str]):
    """The plain process clips its gradient, the server the mean of the workers', and neither decays a branch that was
    not in the loss."""
    wanted = plain("branches", tmp_path, CLIP="0.1", **more)
    server = cluster.server("--mode", "sync", "--workers", "2", "--steps", "14", "--clip-norm", "0.1")
    out = tmp_path / "together.pt"
    environ = {"BATCH": str(BATCH), "OUT": str(out), **more}
    scripts = [cluster.script(rank, HERE / "branches.py", **environ) for rank in range(2)]
    assert [script.wait() for script in (*scripts, server)] == [0, 0, 0], scripts[0].output + scripts[1].output
    found = torch.load(out)
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, rtol=1e-6, atol=1e-9), name
