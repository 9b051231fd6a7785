"""A comparison of real runs says what the processes did: their own clocks and batches are compared with the report."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from paramserver.common.reporting.summary import Summary
from paramserver.tests.cluster import Cluster

# The first step of a process takes long, as loading kernels or a compiler does; each call says when it was, of how many
# samples.
TASK = """
import os, time
import torch
from torch import nn

class Slow:
    def __init__(self):
        self.said = open(f"calls-{os.getpid()}.txt", "a", buffering=1)
        self.is_first = True
    def model(self):
        torch.manual_seed(0)
        return nn.Linear(4, 2)
    def train_data(self):
        return torch.utils.data.TensorDataset(torch.randn(4096, 4), torch.zeros(4096, dtype=torch.long))
    def loss(self, model, batch):
        time.sleep(3.0 if self.is_first else 0.02)
        self.is_first = False
        print(time.monotonic(), len(batch[0]), file=self.said)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
    def evaluate(self, model):
        return {"loss": 0.5}
"""


def calls(folder: Path) -> list[tuple[float, int]]:
    """When each step of all processes was computed, of how many samples; from when all have taken their first."""
    of_each = []
    for path in folder.glob("calls-*.txt"):
        lines = [line.split() for line in path.read_text().splitlines()]
        of_each.append([(float(at), int(count)) for at, count in lines])
        path.unlink()
    began = max(those[0][0] for those in of_each)
    return sorted(item for item in chain(*of_each) if item[0] >= began)


@pytest.mark.slow
@pytest.mark.parametrize("modes", ["sync,async", "localsgd"])
def test_rates_are_those_of_the_processes_whatever_the_first_step_takes(cluster: Cluster, modes: str) -> None:
    (cluster.folder / "slow.py").write_text(TASK)
    found, done = {}, {}
    for mode in ("single", *modes.split(",")):
        result = cluster.command(
            "launch", "--mode", mode, "--task", "slow.py:Slow", "-n", "2", "--steps", "80", "--batch-size", "8",
            "--summary", "s.json", *(["--set", "policy.local_steps=4"] if mode == "localsgd" else []),
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        found[mode] = Summary.model_validate_json((cluster.folder / "s.json").read_text())
        done[mode] = calls(cluster.folder)
    for mode, item in found.items():
        assert [worker.training_steps for worker in item.workers] == [80] * len(item.workers)
        seconds = done[mode][-1][0] - done[mode][0][0]
        samples = sum(count for _, count in done[mode][1:])
        assert item.samples_per_s == pytest.approx(samples / seconds, rel=0.2), mode
        assert item.union_steps_per_s == pytest.approx(item.samples_per_s / 16, rel=0.05), mode
        assert item.wall_s > 3.0 + seconds / 2
