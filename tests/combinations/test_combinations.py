"""The array covers what it says. Twelve rows of it, drawn by the hash of the commit, run in make campaigns."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from .options import OPTIONS, Row, array, is_promised
from .run import run
from .script import EPOCHS, SAMPLES

NUM_SAMPLED = 12


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_every_promised_pair_is_in_the_array(seed: int) -> None:
    rows = array(seed)
    assert len(rows) >= 130 and all(is_promised(row) for row in rows)
    for first, second in itertools.combinations(OPTIONS, 2):
        for pair in itertools.product(OPTIONS[first], OPTIONS[second]):
            values = {first: pair[0], second: pair[1]}
            if is_promised(values):
                assert any(row.items() >= values.items() for row in rows), values


def sampled() -> list[Row]:
    folder = Path(__file__).parent
    hash_ = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False).stdout
    rows = array(1)
    return random.Random(hash_).sample(rows, NUM_SAMPLED)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", ["sync", "allreduce"])
@pytest.mark.parametrize("loop", ["accumulate", "prefetch", "ahead"])
def test_a_killed_server_changes_no_bit(mode: str, loop: str, tmp_path: Path) -> None:
    """Where the loop holds batches whose steps the run has not taken."""
    saved, samples = list[dict[str, torch.Tensor]](), set[int]()
    for fault in ("none", "kill_server"):
        folder = tmp_path / fault
        judgement = run({"mode": mode, "loop": loop, "fault": fault, "workers": "2"}, folder)
        assert judgement.is_well, (judgement.problems, judgement.output[-2000:])
        saved.append(load_file(folder / "saved.safetensors"))
        samples.add(json.loads((folder / "summary.json").read_text())["samples"])
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0]) and samples == {EPOCHS * SAMPLES}


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_rows_of_the_array(tmp_path: Any) -> None:
    failed = [judgement for row in sampled() if not (judgement := run(row, tmp_path / "row")).is_well]
    assert not failed, [(judgement.row, judgement.problems) for judgement in failed]
