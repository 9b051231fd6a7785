"""Tensors through shared memory, through the real programs: each contribution once, beside other transports, and
nothing left behind by whoever is killed when."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paramserver.tests.cluster import at_gates, end_well
from paramserver.tests.common.wire.test_segments import shared_files

pytestmark = pytest.mark.slow

if not sys.platform.startswith("linux"):
    pytest.skip("shared memory is Linux's", allow_module_level=True)

STEPS = 12
PADDING = "700000"  # 2.8 MB: two windows, and time to be read while it is made
_LABEL = re.compile(r"/memfd:paramserver-([0-9a-f]{32})")


def segments_of(pid: int) -> Counter[str]:
    """Labels of the segments a process has mapped, each with its number of descriptors: whoever made a
    segment has one more than who opened it."""
    found: Counter[str] = Counter()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed since
            found.update(_LABEL.findall(os.readlink(f"/proc/{pid}/fd/{descriptor}")))
    found.update(dict.fromkeys(_LABEL.findall(Path(f"/proc/{pid}/maps").read_text()), 0))
    return found


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def serve(cluster, mode: str, num_workers: int):
    return cluster.server(
        "--mode", mode, "--workers", str(num_workers), "--steps", str(STEPS), "--save", "w.safetensors",
        "--set", "policy.weighting=equal",
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_every_contribution_is_applied_once_on_all_transports_at_a_time(cluster, mode):
    """Several read while others' commits are made: of all versions, each is written where nobody reads."""
    server = serve(cluster, mode, 4)
    flags = ({}, {}, {"PS_WORKER__TRANSPORTS": "direct,grpc"}, {"PS_WORKER__TRANSPORTS": "grpc"})
    workers = [cluster.script(rank, "onehot.py", str(STEPS), PADDING=PADDING, **env) for rank, env in enumerate(flags)]
    end_well(*workers, server)
    weights = load_file(cluster.folder / "w.safetensors")
    assert torch.equal(-weights["seen"].view(-1, STEPS)[:4], torch.ones(4, STEPS))
    assert weights["padding"].unique().tolist() == [-4.0 * STEPS]
    transports = [worker.event("tensors")["transport"] for worker in workers]
    assert transports == ["shared memory", "shared memory", "direct", "grpc"]


@pytest.mark.parametrize("where", ["placing", "reading"])
def test_a_worker_is_killed_in_the_middle(cluster, where):
    """Its unfinished contribution leaves nothing behind, its memory goes with it, the other one trains on."""
    server = serve(cluster, "async", 2)
    survivor = cluster.script(0, "onehot.py", str(STEPS), str(cluster.folder / "go"), "6", PADDING="3000000")
    victim = cluster.script(1, "halting.py", str(STEPS), where, "3", PADDING="3000000")
    victim.until(lambda: f"halts {where}" in victim.output, "halt")
    at_gates(survivor)
    pid = server.popen.pid
    of_victim = {label for label, count in segments_of(victim.popen.pid).items() if count > 1}
    assert of_victim <= segments_of(pid).keys() and len(of_victim) == 1, "the victim shares nothing with the server"
    files = shared_files()
    before = num_descriptors(pid)
    victim.kill()
    server.event("left")
    server.until(lambda: not of_victim & segments_of(pid).keys(), "end of the victim's segment")
    server.until(lambda: num_descriptors(pid) < before, "descriptor closed")
    (cluster.folder / "go").touch()
    end_well(survivor, server)
    assert shared_files() == files
    weights = load_file(cluster.folder / "w.safetensors")
    applied = -weights["seen"].view(-1, STEPS)
    of_victim_applied = 2 if where == "placing" else 3
    assert applied[0].tolist() == [1.0] * STEPS
    assert applied[1].tolist() == [1.0] * of_victim_applied + [0.0] * (STEPS - of_victim_applied)
    assert weights["padding"].unique().tolist() == [-(STEPS + of_victim_applied)]
