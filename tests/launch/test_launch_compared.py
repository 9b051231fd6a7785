"""A comparison of real runs says what the processes did: their own clocks and batches are compared with the report."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from statistics import fmean

import pytest

from paramserver.common.reporting.summary import Summary
from paramserver.tests.cluster import Cluster

ROOT = Path(__file__).parents[2]
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


@pytest.mark.slow
@pytest.mark.parametrize("config", ["xor", "digits"])
def test_the_configurations_that_are_offered(cluster: Cluster, config: str) -> None:
    result = cluster.command(
        "launch", str(ROOT / f"configs/{config}.yaml"), "--mode", "single,sync,localsgd", "-n", "4", "--steps", "50",
        "--summary", "s.json", "--report", "out", "--set", "output.track_dir=runs",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    runs = [Summary.model_validate(run) for run in json.loads((cluster.folder / "s.json").read_text())["runs"]]
    assert [[worker.training_steps for worker in run.workers] for run in runs] == [[50], [50] * 4, [50] * 4]
    assert [{worker.contributions for worker in run.workers} for run in runs] == [{50}, {50}, {7}]
    text = (cluster.folder / "out/report.md").read_text()
    head, rows = cells(text)
    for row, item in zip(rows, runs, strict=True):
        batch = item.samples / fmean(worker.training_steps for worker in item.workers)
        assert batch == pytest.approx(128, rel=0.1)  # the digits of a worker end in a batch that is not full
        assert item.samples_per_s == pytest.approx(item.union_steps_per_s * batch, rel=0.1)
        rate = float(row[head.index("samples/s")].replace(",", ""))
        assert rate == pytest.approx(item.samples_per_s, abs=0.6)
    # The compiler of torch is no training: all of a run but it is in its seconds, at about the pace of the later steps.
    assert runs[0].wall_s < 3 * 50 / runs[0].union_steps_per_s
    shown = cluster.command("catalog", "compare", *names(cluster), "--db", "runs/paramserver.db", "--json")
    modes = json.loads(shown.stdout)["differences"]["run.mode"]
    assert sorted(modes) == ["localsgd", "single", "sync"]


def cells(text: str) -> tuple[list[str], list[list[str]]]:
    """Of the first table of a report in Markdown."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:5]]
    return table[0], table[2:]


def names(cluster: Cluster) -> list[str]:
    result = cluster.command("catalog", "list", "--db", "runs/paramserver.db", "--json")
    return re.findall(r'"id": "([0-9a-f]+)"', result.stdout)
