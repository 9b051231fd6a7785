"""Payloads of a model that lies in several processes, beside those of the same model in one: the same bytes go out, the
same weights come in. Each rank is a thread here, its words go over torch's Gloo.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from paramserver.common.errors import DivergedError, ParamServerError
from paramserver.common.kinds import ContributionKind
from paramserver.common.tensors.layout import copy_of
from paramserver.common.tensors.sharding import divide
from paramserver.worker.replica_group import redistribution as relays
from paramserver.worker.replica_group.group import Channel
from paramserver.worker.replica_group.redistribution import RedistributedTransfer, Redistribution
from paramserver.worker.strategies.collectives import backends
from paramserver.worker.tensors.transfer import DirectTransfer, ModelTensors, part_of

SIZE = 3


@pytest.fixture(scope="module")
def channels() -> list[Channel]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def open_one(rank: int) -> Channel:
        at = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=30))
        return Channel(backends.gloo(dist.PrefixStore("words", client), rank, SIZE, at, 30.0), rank, SIZE)

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(open_one, range(SIZE)))


class Model(nn.Module):
    """Tensors of some shapes and dtypes, a frozen one, buffers, one without a gradient."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        torch.manual_seed(chance.randrange(2**31))
        for index in range(chance.randrange(1, 6)):
            shape = [chance.choice([1, 2, 5, 7, 40]), *([chance.choice([1, 3, 8])] * chance.randrange(2))]
            dtype = chance.choice([torch.float32, torch.float64, torch.bfloat16])
            parameter = nn.Parameter(torch.randn(shape).to(dtype), requires_grad=index == 0 or chance.random() < 0.8)
            if index == 0 or chance.random() < 0.7:
                parameter.grad = torch.randn(shape).to(dtype) if parameter.requires_grad else None
            self.register_parameter(f"p{index}", parameter)
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("mean", torch.randn(5))


def rows_of(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    each = -(-tensor.shape[0] // SIZE)
    return tensor[min(len(tensor), rank * each) : min(len(tensor), (rank + 1) * each)].clone()


class Lain:
    """What a rank has of a model: its rows of parameters, and buffers whole."""

    def __init__(self, model: ModelTensors, rank: int) -> None:
        def part(item: torch.Tensor | None) -> torch.Tensor | None:
            return item if item is None else rows_of(item, rank) if isinstance(item, nn.Parameter) else item.clone()

        self.tensors = [part(tensor) for tensor in model.tensors]
        self.gradients = list(self.tensors)
        for index, tensor in enumerate(model.tensors):
            if isinstance(tensor, nn.Parameter):
                self.gradients[index] = None if tensor.grad is None else rows_of(tensor.grad, rank)

    def find(self, kind: ContributionKind, index: int) -> torch.Tensor | None:
        return (self.gradients if kind == ContributionKind.GRADIENT else self.tensors)[index]


@contextmanager
def redistributed(channels: list[Channel], model: ModelTensors) -> Iterator[tuple[Redistribution, list[Lain]]]:
    def borders(entry: torch.Tensor) -> list[int] | None:
        if not isinstance(entry, nn.Parameter):
            return None
        each, row = -(-entry.shape[0] // SIZE), entry[0].nbytes
        return [min(entry.shape[0], rank * each) * row for rank in range(SIZE + 1)]

    found = [Redistribution(channel, [borders(tensor) for tensor in model.tensors]) for channel in channels]
    lain = [Lain(model, rank) for rank in range(SIZE)]
    for redistribution, part in zip(found, lain, strict=True):
        redistribution.find = part.find
    with ThreadPoolExecutor(SIZE) as pool:
        found[0].begin()
        following = [pool.submit(redistribution.follow) for redistribution in found[1:]]
        try:
            yield found[0], lain
        finally:
            found[0].end({"why": "enough"})
        assert [item.result()["why"] for item in following] == ["enough"] * (SIZE - 1)


def meta(model: Model) -> ModelTensors:
    """The same, without memory."""
    whole = nn.Module()
    for name, tensor in model.named_parameters():
        shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        whole.register_parameter(name, nn.Parameter(shape, requires_grad=tensor.requires_grad))
    for name, tensor in model.named_buffers():
        whole.register_buffer(name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
    return ModelTensors(whole)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), window_bytes=st.sampled_from([24, 100, 1000, 1 << 20]), shards=st.integers(1, 2))
def test_the_same_bytes_as_of_a_model_in_one_process(
    channels: list[Channel], monkeypatch: pytest.MonkeyPatch, seed: int, window_bytes: int, shards: int
) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(relays, "_WINDOW_BYTES", window_bytes)
    module = Model(chance)
    model = ModelTensors(module)
    whole = meta(module)
    try:
        shares = divide(model.layout, shards)
    except ParamServerError:  # it has not as many rows
        shares = divide(model.layout, 1)
    with redistributed(channels, model) as (redistribution, lain):
        whole.transfer_of = lambda part: RedistributedTransfer(part, redistribution)
        for share in shares:
            here, there = part_of(model, share), part_of(whole, share)
            assert there.transfer_of is not None
            direct, transfer = DirectTransfer(here), there.transfer_of(there)
            segment = torch.full((there.layout.exchange_bytes,), 255, dtype=torch.uint8)
            for kind in (ContributionKind.GRADIENT, ContributionKind.WEIGHTS):
                sent = b"".join(direct.gather(kind)[0].pieces)
                assert b"".join(bytes(piece) for piece in transfer.gather(kind)[0].pieces) == sent
                streamed = bytearray(len(sent))
                for stretch in transfer.stream(kind):
                    (piece,) = stretch.pieces
                    assert len(piece) <= window_bytes
                    streamed[stretch.offset : stretch.offset + len(piece)] = piece
                assert streamed == sent
                assert [end for _, end in transfer.gather_into(kind, segment)][-1:] == [len(sent)]
                assert bytes(segment.numpy()) == sent
            every = b"".join(bytes(item) for item in transfer.gather_all())
            assert every == b"".join(map(bytes, direct.gather_all()))
            payload = copy_of(chance.randbytes(there.layout.total_bytes))
            data, at = memoryview(payload.numpy()), 0
            while at < len(data):
                piece = data[at : at + chance.choice([1, 64, 1000])]
                direct.write(at, piece)
                transfer.write(at, piece)
                at += len(piece)
            transfer.finish_write(len(data))
    for rank, laid in enumerate(lain):
        for mine, tensor in zip(laid.tensors, model.tensors, strict=True):
            wanted = rows_of(tensor, rank) if isinstance(tensor, nn.Parameter) else tensor
            assert mine is not None
            assert mine.reshape(-1).view(torch.uint8).equal(wanted.detach().reshape(-1).view(torch.uint8))


def test_a_transport_that_goes_on_asking_when_the_others_follow_no_more_gets_nothing(channels: list[Channel]) -> None:
    """As of a connection that was lost, whose thread finds out when it sends next."""
    module = Model(random.Random(1))
    whole = meta(module)
    with redistributed(channels, ModelTensors(module)) as (redistribution, _):
        transfer = RedistributedTransfer(whole, redistribution)
        late = transfer.stream(ContributionKind.GRADIENT)
    assert list(late) == []


def test_the_error_that_ends_inner_rank_0_ends_the_others(channels: list[Channel]) -> None:
    found = [Redistribution(channel, []) for channel in channels]
    with ThreadPoolExecutor(SIZE) as pool:
        following = [pool.submit(redistribution.follow) for redistribution in found[1:]]
        found[0].begin()
        found[0].fail(DivergedError("the mean gradient is not finite", fix="lower --lr"))
    for item in following:
        with pytest.raises(ParamServerError, match="group rank 0 has ended: the mean gradient is not finite") as raised:
            item.result()
        assert raised.value.exit_code == DivergedError("").exit_code


def test_two_connections_may_ask_at_once(channels: list[Channel]) -> None:
    """As those with two shards do, each on a thread of its own."""
    module = Model(random.Random(5))
    model, whole = ModelTensors(module), meta(module)
    with redistributed(channels, model) as (redistribution, _):
        wanted = b"".join(DirectTransfer(model).gather(ContributionKind.WEIGHTS)[0].pieces)

        def gather(_: int) -> bytes:
            (stretch,) = RedistributedTransfer(whole, redistribution).gather(ContributionKind.WEIGHTS)
            return b"".join(map(bytes, stretch.pieces))

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(gather, range(40))) == [wanted] * 40
