"""diloco with local steps during exchanges, over real processes, ends where plain torch does: of all parameters and of
a fragment at a time, in codecs that remember, over shards, with a worker that joins late, and after a server was
killed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file

from paramserver.common.registry import CODECS
from paramserver.common.tensors.sharding import divide
from paramserver.tests.cluster import Cluster, at_gates, end_well
from paramserver.tests.loopback.scripts import outer
from paramserver.worker.tensors.local_steps import fragments_of
from paramserver.worker.tensors.transfer import ModelTensors

pytestmark = pytest.mark.slow

# With this momentum torch's fused SGD rounds the same in vectors and in what is left over; with 0.9 it does not.
STEPS, LR, MOMENTUM = 28, 0.7, 0.5
Trip = Callable[[str, torch.Tensor], torch.Tensor]


def trip_of(inner: str, codec: str, shards: int) -> Trip:
    """What the other side makes of a tensor that is sent in a codec, each shard's rows by themselves."""
    coder, layout = CODECS.load(codec)(), ModelTensors(outer.make(inner)[0]).layout
    parts = [part for share in divide(layout, shards) for part in share.parts]

    def rows(tensor: torch.Tensor, encodes: bool) -> torch.Tensor:
        if not encodes:
            return tensor.bfloat16().to(tensor.dtype)
        encoded = torch.empty(coder.size_of(tensor.numel(), len(tensor)), dtype=torch.uint8)
        coder.encode_piece(tensor.float().reshape(-1), encoded)
        decoded = torch.empty(tensor.numel())
        coder.decode_piece(encoded, decoded)
        return decoded.view(tensor.shape).to(tensor.dtype)

    def trip(name: str, item: torch.Tensor) -> torch.Tensor:
        here = [part for part in parts if part.spec.name == name]
        return torch.cat([rows(part.of(item), coder.encodes(part.as_spec())) for part in here])

    return trip if codec != "raw" else lambda name, item: item


def reference(
    inner: str,
    h: int,
    num: int,
    tau: int,
    begins: dict[int, tuple[int, ...]],
    up: tuple[Trip, float] = (lambda name, item: item, 1.0),
    down: Trip = lambda name, item: item,
    delay: int = 1,
) -> dict[str, torch.Tensor]:
    """Plain torch. `tau` 0: exchanges are waited for. `begins`: ranks that have the server's weights, all of them, at
    the beginning of that round, and nothing on its way; when rank 0 does, the server is a new one. What `up`, a trip
    and a decay, leaves out of a worker's tensor is added to the next; `down` moves what all workers are given. The
    momentum moves with every `delay`th delta (arXiv:2401.09135)."""
    made = {rank: outer.make(inner) for ranks in begins.values() for rank in ranks}
    local = {rank: {name: item.data for name, item in model.named_parameters()} for rank, (model, _) in made.items()}
    first = ModelTensors(made[0][0]).layout.entries
    of = dict(zip([entry.spec.name for entry in first], fragments_of(first, num), strict=True))
    theta = {name: item.clone() for name, item in local[0].items()}
    buffer, moved = ({name: torch.zeros_like(item) for name, item in theta.items()} for _ in range(2))
    given: dict[str, torch.Tensor] = {}
    anchor: dict[int, dict[str, torch.Tensor]] = {}
    sent: dict[int, dict[str, torch.Tensor]] = {}
    left: dict[int, dict[str, torch.Tensor]] = {}

    def merge(rank: int) -> None:
        for name, before in sent[rank].items():
            now, new = local[rank][name], given[name]
            now.copy_(new + (now - before) if tau else new)
            anchor[rank][name] = new.clone()
        sent[rank] = {}

    for number, begin in enumerate(range(0, STEPS, h // num)):
        end = min(STEPS, begin + h // num)
        if 0 in begins.get(number, ()):
            given = {name: item.clone() for name, item in theta.items()}
        for rank in begins.get(number, ()):
            anchor[rank], sent[rank] = {name: tensor.clone() for name, tensor in given.items()}, {}
            left[rank] = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
            for name, element in local[rank].items():
                element.copy_(given[name])
        for rank in anchor:
            model, optimizer = made[rank]
            for step in range(begin, end):
                outer.backward(model, rank, step)
                optimizer.step()
                if step + 1 == min(begin + tau, end):
                    merge(rank)
        total = sum(outer.size(rank) for rank in anchor)
        for name in theta:
            if end < STEPS and of[name] != number % num:
                continue
            delta = torch.zeros_like(theta[name])
            for rank in anchor:
                whole = anchor[rank][name] - local[rank][name] + up[1] * left[rank][name]
                counts = up[0](name, whole)
                left[rank][name] = whole - counts
                delta += outer.size(rank) / total * counts
                sent[rank][name] = local[rank][name].clone()
            moved[name] += delta
            if (number + 1) % delay == 0:
                buffer[name] = MOMENTUM * buffer[name] + moved[name]
                delta = delta + MOMENTUM * buffer[name]
                moved[name].zero_()
            theta[name] = theta[name] - LR * delta
            given[name] = given[name] + down(name, theta[name] - given[name])
        for rank in anchor if not tau else ():
            merge(rank)
    return theta


def flags(h: int, num: int, tau: int, *more: str) -> tuple[str, ...]:
    overlapped = ("--delayed-update", "--overlap-steps", str(tau)) if tau else ()
    overlapped += ("--fragments", str(num)) if num > 1 else ()
    return (
        "--mode", "diloco", "--steps", str(STEPS), "--local-steps", str(h), *overlapped,
        "--outer-momentum", str(MOMENTUM), "--save", "w.safetensors", "--history", "h.jsonl", *more,
    )  # fmt: skip


def assert_is(cluster: Cluster, wanted: dict[str, torch.Tensor]) -> None:
    found = load_file(cluster.folder / "w.safetensors")
    largest = max(tensor.abs().max().item() for tensor in wanted.values())
    for name, item in wanted.items():
        assert (found[name] - item).abs().max().item() / largest < 1e-12, name
    checked = cluster.command("launch", "check", "h.jsonl")
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("h", "num", "tau", "shards"),
    [
        (10, 5, 1, 2), (5, 1, 3, 1), (6, 2, 1, 1), (6, 3, 2, 2), (10, 5, 2, 2),
        *(pytest.param(*item, marks=pytest.mark.campaign) for item in ((5, 1, 2, 2), (6, 2, 3, 2), (6, 3, 1, 1))),
    ],
)  # fmt: skip
def test_it_equals_plain_torch(cluster: Cluster, h: int, num: int, tau: int, shards: int) -> None:
    server = cluster.server(*flags(h, num, tau, "--workers", "2", "--shards", str(shards)))
    others = cluster.shards(shards)
    workers = [cluster.script(rank, "outer.py", "adamw-deep") for rank in range(2)]
    end_well(*workers, server, *others)
    assert_is(cluster, reference("adamw-deep", h, num, tau, {0: (0, 1)}))


@pytest.mark.parametrize(
    ("num", "tau", "shards", "up", "down", "transport"),
    [
        (5, 1, 1, "q4", "q4", "direct,grpc"), (2, 2, 2, "q4", "q4", "direct,grpc"),
        (3, 0, 1, "int8", "q4", "grpc"), (3, 1, 2, "sparse", "raw", "grpc"),
        *(
            pytest.param(*item, marks=pytest.mark.campaign)
            for item in (
                (5, 0, 2, "q4", "int8", "direct,grpc"), (2, 3, 1, "sparse", "q4", "direct,grpc"),
                (5, 2, 1, "raw", "int8", "direct,grpc"),
            )
        ),
    ],
)  # fmt: skip
def test_codecs_that_remember_have_each_fragment_s_own(
    cluster: Cluster, num: int, tau: int, shards: int, up: str, down: str, transport: str
) -> None:
    h, inner = {2: 6, 3: 9, 5: 10}[num], "adamw-wide"
    server = cluster.server(*flags(h, num, tau, "--workers", "2", "--shards", str(shards)))
    others = cluster.shards(shards)
    environ = {"PS_WORKER__CODEC": up, "PS_WORKER__REPLY_CODEC": down, "PS_WORKER__TRANSPORTS": transport}
    workers = [cluster.script(rank, "outer.py", inner, **environ) for rank in range(2)]
    end_well(*workers, server, *others)
    ups = trip_of(inner, up, shards), CODECS.load(up)().decay
    assert_is(cluster, reference(inner, h, num, tau, {0: (0, 1)}, ups, trip_of(inner, down, shards)))


@pytest.mark.parametrize("codec", ["raw", "q4"])
def test_a_worker_that_joins_late_begins_with_what_the_others_have(cluster: Cluster, codec: str) -> None:
    server = cluster.server(*flags(6, 3, 1))
    gate, inner = cluster.folder / "go", "adamw-deep" if codec == "raw" else "adamw-wide"
    environ = {"PS_WORKER__CODEC": codec, "PS_WORKER__REPLY_CODEC": codec}
    first = cluster.script(0, "outer.py", inner, str(gate), "12", **environ)
    at_gates(first)
    second = cluster.script(1, "outer.py", inner, str(gate), "12", **environ)
    at_gates(second)
    gate.touch()
    end_well(first, second, server)
    trip = trip_of(inner, codec, 1)
    assert_is(cluster, reference(inner, 6, 3, 1, {0: (0,), 6: (1,)}, (trip, 1.0), trip))


@pytest.mark.parametrize("codec", ["raw", "q4"])
def test_a_killed_server_goes_on_from_its_snapshot(cluster: Cluster, codec: str) -> None:
    """Steps of fragments that had not had their turn, and what was on its way or left out, are done again."""
    arguments = flags(
        6, 3, 1, "--workers", "2", "--checkpoint-dir", "snapshots", "--checkpoint-every", "5", "--set",
        "policy.min_workers=2",
    )  # fmt: skip
    server = cluster.server(*arguments)
    gate, inner = cluster.folder / "go", "sgd-deep" if codec == "raw" else "sgd-wide"
    codecs = {"PS_WORKER__CODEC": codec, "PS_WORKER__REPLY_CODEC": codec}
    workers = [cluster.script(rank, "outer.py", inner, str(gate), "12", **codecs) for rank in range(2)]
    at_gates(*workers)
    server.snapshot()
    server.kill()
    second = cluster.server(*arguments, "--listen", cluster.address)
    gate.touch()
    end_well(*workers, second)
    version = second.event("resumed")["version"]
    assert version > 0
    trip = trip_of(inner, codec, 1)
    assert_is(cluster, reference(inner, 6, 3, 1, {0: (0, 1), version: (0, 1)}, (trip, 1.0), trip))


def test_async_diloco_goes_on_meanwhile_and_after_a_kill_of_the_server(cluster: Cluster) -> None:
    """One worker, whose deltas are whole rounds: what was on its way at the kill is done again, over two shards before
    and after."""
    arguments = flags(
        5, 1, 3, "--mode", "async_diloco", "--outer-lr", str(LR), "--workers", "1", "--shards", "2",
        "--checkpoint-dir", "snapshots", "--checkpoint-every", "2",
    )  # fmt: skip
    server, gate = cluster.server(*arguments), cluster.folder / "go"
    other = cluster.shard(1, 2, "--checkpoint-dir", "snapshots")
    worker = cluster.script(0, "outer.py", "sgd", str(gate), "13")
    at_gates(worker)
    server.snapshot(2)
    server.kill()
    second = cluster.server(*arguments, "--listen", cluster.address)
    gate.touch()
    end_well(worker, second, other)
    assert second.event("resumed")["version"] == 2
    assert_is(cluster, reference("sgd", 5, 1, 3, {0: (0,), 2: (0,)}))
