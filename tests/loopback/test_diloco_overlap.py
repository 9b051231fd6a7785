"""diloco with local steps during exchanges, over real processes, ends where plain torch does: of all parameters and of
a fragment at a time, over shards, with a worker that joins late, and after a server was killed."""

from __future__ import annotations

import signal

import pytest
import torch
from safetensors.torch import load_file

from paramserver.tests.loopback.conftest import Cluster
from paramserver.tests.loopback.scripts import outer
from paramserver.worker.tensors.fragments import divided
from paramserver.worker.tensors.transfer import ModelTensors

STEPS, LR, MOMENTUM, ALPHA = 28, 0.7, 0.5, 0.5


def reference(
    inner: str, h: int, num: int, tau: int, rule: str, begins: dict[int, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """Plain torch. `begins`: ranks that have the server's weights, all of them, at the beginning of that round, and
    nothing on its way."""
    made = {rank: outer.make(inner) for ranks in begins.values() for rank in ranks}
    local = {rank: {name: one.data for name, one in model.named_parameters()} for rank, (model, _) in made.items()}
    first = ModelTensors(made[0][0]).layout.entries
    of = dict(zip([entry.spec.name for entry in first], divided(first, num), strict=True))
    theta = {name: one.clone() for name, one in local[0].items()}
    buffer = {name: torch.zeros_like(one) for name, one in theta.items()}
    anchor: dict[int, dict[str, torch.Tensor]] = {}
    sent: dict[int, dict[str, torch.Tensor]] = {}
    for number, begin in enumerate(range(0, STEPS, h // num)):
        end = min(STEPS, begin + h // num)
        for rank in begins.get(number, ()):
            anchor[rank], sent[rank] = {name: one.clone() for name, one in theta.items()}, {}
            for name, one in local[rank].items():
                one.copy_(theta[name])
        for rank in anchor:
            model, optimizer = made[rank]
            for step in range(begin, end):
                outer.backward(model, rank, step)
                optimizer.step()
                if step + 1 == min(begin + tau, end):
                    for name, before in sent[rank].items():
                        now, new = local[rank][name], theta[name]
                        blended = ALPHA * now + (1 - ALPHA) * new
                        now.copy_(new + (now - before) if rule == "shift" else blended)
                        anchor[rank][name] = new.clone()
            sent[rank] = {}
        total = sum(outer.size(rank) for rank in anchor)
        for name in theta:
            if end < STEPS and of[name] != number % num:
                continue
            delta = sum(outer.size(rank) * (anchor[rank][name] - local[rank][name]) for rank in anchor) / total
            for rank in anchor:
                sent[rank][name] = local[rank][name].clone()
            buffer[name] = MOMENTUM * buffer[name] + delta
            theta[name] = theta[name] - LR * (delta + MOMENTUM * buffer[name])
    return theta


def flags(h: int, num: int, tau: int, rule: str, *more: str) -> tuple[str, ...]:
    return (
        "--mode", "diloco", "--steps", str(STEPS), "--local-steps", str(h), "--fragments", str(num),
        "--pipelined", "--overlap-steps", str(tau), "--merge", rule, "--outer-momentum", str(MOMENTUM), "--save",
        "w.safetensors", "--history", "h.jsonl", *more,
    )  # fmt: skip


def assert_is(cluster: Cluster, wanted: dict[str, torch.Tensor]) -> None:
    found = load_file(cluster.folder / "w.safetensors")
    largest = max(one.abs().max().item() for one in wanted.values())
    for name, one in wanted.items():
        assert (found[name] - one).abs().max().item() / largest < 1e-12, name
    checked = cluster.command("launch", "check", "h.jsonl")
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("h", "num", "tau", "rule", "shards"),
    [
        (10, 5, 1, "blend", 2),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                (5, 1, 3, "blend", 1), (5, 1, 2, "shift", 2), (6, 2, 3, "blend", 2), (6, 2, 1, "shift", 1),
                (6, 3, 2, "shift", 2), (6, 3, 1, "blend", 1), (10, 5, 2, "shift", 2),
            )
        ),
    ],
)  # fmt: skip
def test_it_equals_plain_torch(cluster: Cluster, h: int, num: int, tau: int, rule: str, shards: int) -> None:
    server = cluster.server(*flags(h, num, tau, rule, "--workers", "2", "--shards", str(shards)))
    others = [cluster.shard(number, shards) for number in range(1, shards)]
    workers = [cluster.script(rank, "outer.py", "adamw-deep") for rank in range(2)]
    assert {one.wait() for one in (*workers, server, *others)} == {0}, workers[0].output
    assert_is(cluster, reference("adamw-deep", h, num, tau, rule, {0: (0, 1)}))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["blend", "shift"])
def test_a_worker_that_joins_late_begins_with_the_server_s_weights(cluster: Cluster, rule: str) -> None:
    server = cluster.server(*flags(6, 3, 1, rule))
    gate = cluster.folder / "go"
    first = cluster.script(0, "outer.py", "adamw-deep", str(gate), "12")
    first.until(lambda: "at the gate" in first.output, "gate")
    second = cluster.script(1, "outer.py", "adamw-deep", str(gate), "12")
    second.until(lambda: "at the gate" in second.output, "gate")
    gate.touch()
    assert {one.wait() for one in (first, second, server)} == {0}, second.output
    assert_is(cluster, reference("adamw-deep", 6, 3, 1, rule, {0: (0,), 6: (1,)}))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["blend", "shift"])
def test_a_killed_server_goes_on_from_its_snapshot(cluster: Cluster, rule: str) -> None:
    """Steps of fragments that had not had their turn, and what was on its way, are done again from there."""
    told = flags(
        6,
        3,
        1,
        rule,
        "--workers",
        "2",
        "--checkpoint-dir",
        "snapshots",
        "--checkpoint-every",
        "5",
        "--set",
        "policy.min_workers=2",
    )
    server = cluster.server(*told)
    gate = cluster.folder / "go"
    workers = [cluster.script(rank, "outer.py", "sgd-deep", str(gate), "12") for rank in range(2)]
    for one in workers:
        one.until(lambda one=one: "at the gate" in one.output, "gate")
    server.until(lambda: any(one["version"] for one in server.events("snapshot")), "snapshot")
    server.signal(signal.SIGKILL)
    server.popen.wait()
    second = cluster.server(*told, "--listen", cluster.address)
    gate.touch()
    assert {one.wait() for one in (*workers, second)} == {0}, workers[0].output
    version = second.event("resumed")["version"]
    assert version > 0
    assert_is(cluster, reference("sgd-deep", 6, 3, 1, rule, {0: (0, 1), version: (0, 1)}))
