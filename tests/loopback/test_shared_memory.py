"""Tensors through shared memory, through the real programs: the same results as over the connection, and
nothing left behind by whoever is killed when."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paramserver.common.registry import MODES

pytestmark = pytest.mark.slow

if not sys.platform.startswith("linux"):
    pytest.skip("shared memory is Linux's", allow_module_level=True)

STEPS = 12
PADDING = "700000"  # 2.8 MB: two windows, and time to be read while it is made
TASK = (
    "--task", "digits", "--set", "task.args={channels: [8], hidden: 256}", "--optimizer", "adam", "--lr", "0.01",
    "--batch-size", "16", "--steps", str(STEPS), "--save", "w.safetensors", "--summary", "s.json",
)  # fmt: skip
OFF = ("--set", "worker.transports=grpc")
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


def own_segments_of(pid: int) -> set[str]:
    return {label for label, count in segments_of(pid).items() if count > 1}


def shared_files() -> list[str]:
    """But semaphores, which other programs come and go with."""
    return sorted(name for name in os.listdir("/dev/shm") if not name.startswith("sem."))


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def summary_of(cluster) -> dict:
    return json.loads((cluster.folder / "s.json").read_text())


def transports(workers) -> list[str]:
    """As the workers themselves say it."""
    return [worker.event("tensors")["transport"] for worker in workers]


def train(cluster, mode: str, server_flags: tuple[str, ...] = (), worker_flags: tuple[tuple[str, ...], ...] = ((), ())):
    server = cluster.server("--mode", mode, "--workers", str(len(worker_flags)), *TASK, *server_flags)
    workers = [cluster.worker(rank, *flags) for rank, flags in enumerate(worker_flags)]
    assert [worker.wait() for worker in workers] == [0] * len(workers), workers[0].output
    assert server.wait() == 0, server.output
    summary = summary_of(cluster)
    assert [row["transport"] for row in summary["workers"]] == transports(workers)
    assert [event["tensors"] for event in server.events("admitted")].count("grpc") == transports(workers).count("grpc")
    return transports(workers), load_file(cluster.folder / "w.safetensors"), summary


def assert_same(item: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert item.keys() == other.keys()
    for name, tensor in item.items():
        assert torch.equal(tensor, other[name]), name


# ---- which transport -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "more"),
    [(mode, ()) for mode in MODES.names() if mode not in ("sync", "dssp", "async_diloco")]
    + [("async", ("--delayed-update",))],
)
def test_one_worker_alone_gets_the_same_weights_on_every_transport(cluster, mode, more):
    shared, weights, _ = train(cluster, mode, more, ((),))
    assert shared == ["shared memory"]
    for transport, flags in (("direct", ("--set", "worker.transports=direct,grpc")), ("grpc", OFF)):
        found, same, _ = train(cluster, mode, more, (flags,))
        assert found == [transport]
        assert_same(weights, same)


# ---- exactly once ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_every_contribution_is_applied_once_on_all_transports_at_a_time(cluster, mode):
    """Several read while others' commits are made: of all versions, each is written where nobody reads."""
    server = cluster.server(
        "--mode", mode, "--workers", "4", "--steps", str(STEPS), "--save", "w.safetensors", "--summary", "s.json",
        "--set", "policy.weighting=equal",
    )  # fmt: skip
    flags = ({}, {}, {"PS_WORKER__TRANSPORTS": "direct,grpc"}, {"PS_WORKER__TRANSPORTS": "grpc"})
    workers = [cluster.script(rank, "onehot.py", str(STEPS), PADDING=PADDING, **env) for rank, env in enumerate(flags)]
    assert [worker.wait() for worker in workers] == [0] * 4, workers[0].output
    assert server.wait() == 0
    weights = load_file(cluster.folder / "w.safetensors")
    assert torch.equal(-weights["seen"].view(-1, STEPS)[:4], torch.ones(4, STEPS))
    assert weights["padding"].unique().tolist() == [-4.0 * STEPS]
    assert transports(workers) == ["shared memory", "shared memory", "direct", "grpc"]


# ---- killed and frozen ------------------------------------------------------------------------------


def _with_victim(cluster, where: str, step: int, mode: str):
    server = cluster.server(
        "--mode", mode, "--workers", "2", "--steps", str(STEPS), "--save", "w.safetensors", "--summary", "s.json",
        "--set", "policy.weighting=equal",
    )  # fmt: skip
    survivor = cluster.script(0, "onehot.py", str(STEPS), str(cluster.folder / "go"), "6", PADDING="3000000")
    victim = cluster.script(1, "halting.py", str(STEPS), where, str(step))
    victim.until(lambda: f"halts {where}" in victim.output, "halt")
    return server, survivor, victim


@pytest.mark.parametrize("where", ["placing", "reading"])
def test_a_worker_is_killed_in_the_middle(cluster, where):
    """Its unfinished contribution leaves nothing behind, its memory goes with it, the other one trains on."""
    server, survivor, victim = _with_victim(cluster, where, 3, "async")
    survivor.until(lambda: "at the gate" in survivor.output, "gate")
    pid = server.popen.pid
    of_victim = own_segments_of(victim.popen.pid)
    assert of_victim <= segments_of(pid).keys() and len(of_victim) == 1, "the victim shares nothing with the server"
    files = shared_files()
    before = num_descriptors(pid)
    victim.kill()
    server.until(lambda: bool(server.events("left")), "departure")
    server.until(lambda: not of_victim & segments_of(pid).keys(), "end of the victim's segment")
    server.until(lambda: num_descriptors(pid) < before, "descriptor closed")
    (cluster.folder / "go").touch()
    assert survivor.wait() == 0
    assert server.wait() == 0
    assert shared_files() == files
    weights = load_file(cluster.folder / "w.safetensors")
    applied = -weights["seen"].view(-1, STEPS)
    of_victim_applied = 2 if where == "placing" else 3
    assert applied[0].tolist() == [1.0] * STEPS
    assert applied[1].tolist() == [1.0] * of_victim_applied + [0.0] * (STEPS - of_victim_applied)
    assert weights["padding"].unique().tolist() == [-(STEPS + of_victim_applied)]
