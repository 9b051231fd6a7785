"""Payloads out of and into a model: both ways of copying give the same bytes, whatever the tensors and the chunks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paramserver.common.codecs.raw import RawCodec
from paramserver.common.errors import UsageError
from paramserver.common.kinds import ContributionKind
from paramserver.common.tensors.layout import Kind, as_bytes, new_payload
from paramserver.common.tensors.sharding import divide
from paramserver.worker.tensors import staged
from paramserver.worker.tensors.staged import StagedTransfer, make_transfer
from paramserver.worker.tensors.transfer import DirectTransfer, ModelTensors, part_of
from paramserver.worker.transports.transport import Up

Make = Callable[[ModelTensors], DirectTransfer]
TRANSFERS: list[Make] = [DirectTransfer, StagedTransfer]


class Awkward(nn.Module):
    """Every kind of tensor that takes part: tied, frozen, empty, scalar, of other dtypes, and statistics."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.randn(0, 5))
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(5).bfloat16())
        self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("secret", torch.randn(2), persistent=False)

    def set_gradients(self, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.requires_grad:
                gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.grad = gradient.to(parameter.dtype)


def joined(pieces: list[memoryview]) -> bytes:
    return b"".join(pieces)


def tensors_in(model: ModelTensors, payload: bytes) -> dict[str, torch.Tensor]:
    memory = new_payload(model.layout.total_bytes)
    as_bytes(memory)[: len(payload)] = payload
    return {spec.name: view.clone() for spec, view in model.layout.views(memory)}


def write(transfer: DirectTransfer, payload: bytes, boundaries: list[int]) -> None:
    """Hand over `payload` in pieces that end at the boundaries."""
    for start, end in zip([0, *boundaries], [*boundaries, len(payload)], strict=True):
        transfer.write(start, memoryview(payload)[start:end])
    transfer.finish_write(len(payload))


# ---- a model that changes ---------------------------------------------------------------------------


def test_a_model_that_was_moved_is_found_again() -> None:
    module = Awkward()
    model = ModelTensors(module)
    assert not model.has_moved()
    module.norm.double().float()  # as parameters: new memory; as buffers: new tensors
    assert [model.has_moved(), model.has_moved()] == [True, False]
    assert any(tensor is module.norm.running_mean for tensor in model.tensors)


def _replace(module: Awkward) -> None:
    module.scale = nn.Parameter(torch.zeros(()))


def _remove(module: Awkward) -> None:
    del module.flags


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda module: module.half(), "narrow bfloat16[5], and it is float16[5] now"),
        (lambda module: setattr(module.scale, "data", torch.zeros(2)), "scale float32[], and it is float32[2] now"),
        (_replace, "'scale' was replaced by another parameter after session.optimizer()"),
        (_remove, "'flags' was removed from the model after session.optimizer()"),
    ],
)
def test_a_model_that_became_another_is_refused(change: Callable[[Awkward], object], words: str) -> None:
    module = Awkward()
    model = ModelTensors(module)
    change(module)
    with pytest.raises(UsageError) as caught:
        model.has_moved()
    assert words in caught.value.message


def test_tensors_have_the_names_of_the_bare_model() -> None:
    module = Awkward()
    bare = ModelTensors(module)
    compiled = torch.compile(nn.DataParallel(torch.compile(module, backend="eager")), backend="eager")
    assert ModelTensors(compiled).layout.fingerprint == bare.layout.fingerprint
    module.norm = torch.compile(module.norm, backend="eager")  # a part of it
    assert ModelTensors(module).layout.fingerprint == bare.layout.fingerprint
    assert set(ModelTensors(nn.ModuleDict({"module": nn.Linear(1, 1)})).names.values()) == {
        "module.weight",
        "module.bias",
    }


# ---- out -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", TRANSFERS)
def test_a_payload_holds_gradients_or_values_and_initial_weights_everything(make: Make) -> None:
    module = Awkward()
    module.set_gradients()
    model = ModelTensors(module)
    state, transfer = module.state_dict(), make(model)
    gradients = {name: item.grad for name, item in module.named_parameters() if item.requires_grad}
    exchanged = {spec.name for spec in model.layout.specs if spec.kind is not Kind.FROZEN}
    for kind, others in ((ContributionKind.GRADIENT, gradients), (ContributionKind.WEIGHTS, {})):
        payload = joined(transfer.gather(kind)[0].pieces)
        assert len(payload) == model.layout.exchange_bytes < model.layout.total_bytes
        found = tensors_in(model, payload)
        for name in exchanged:
            assert torch.equal(found[name], others.get(name, state[name])), name
    assert not {"secret", "head.weight"} & exchanged, "a tied tensor travels once"
    payload = joined(transfer.gather_all())
    assert len(payload) == model.layout.total_bytes
    assert all(torch.equal(tensor, state[name]) for name, tensor in tensors_in(model, payload).items())


@pytest.mark.parametrize("make", TRANSFERS)
def test_no_gradient_is_zeros(make: Make) -> None:
    """Also after a step in which there was one: nothing of it may be sent again."""
    module = Awkward()
    module.set_gradients()
    model = ModelTensors(module)
    transfer = make(model)
    transfer.gather(ContributionKind.GRADIENT)
    module.embedding.weight.grad = None
    module.wide.grad = None
    found = tensors_in(model, joined(transfer.gather(ContributionKind.GRADIENT)[0].pieces))
    assert not found["embedding.weight"].any()
    assert not found["wide"].any()
    assert found["narrow"].any()
    for parameter in module.parameters():
        parameter.grad = None
    found = tensors_in(model, joined(transfer.gather(ContributionKind.GRADIENT)[0].pieces))
    assert not any(found[spec.name].any() for spec in model.layout.specs if spec.kind is Kind.PARAMETER)


@pytest.mark.parametrize("make", TRANSFERS)
@pytest.mark.parametrize(
    "gradient",
    [
        torch.arange(12.0).view(4, 3).t(),
        torch.arange(24.0).view(3, 8)[:, ::2],
        torch.arange(3.0).view(3, 1).expand(3, 4),
        torch.arange(12.0).view(3, 4).to_sparse(),
    ],
    ids=["transposed", "strided", "expanded", "sparse"],
)
def test_gradients_in_other_memory_formats(make: Make, gradient: torch.Tensor) -> None:
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(3, 4))
    module.w.grad = gradient
    model = ModelTensors(module)
    found = tensors_in(model, joined(make(model).gather(ContributionKind.GRADIENT)[0].pieces))
    assert torch.equal(found["w"], gradient.to_dense())


def test_direct_pieces_are_the_gradients_own_memory() -> None:
    module = nn.Linear(8, 4)
    module.weight.grad, module.bias.grad = torch.ones(4, 8), torch.ones(4)
    pieces = DirectTransfer(ModelTensors(module)).gather(ContributionKind.GRADIENT)[0].pieces
    module.weight.grad.fill_(2.0)
    assert torch.frombuffer(bytearray(pieces[0]), dtype=torch.float32).tolist() == [2.0] * 32


# ---- in --------------------------------------------------------------------------------------------


@given(data=st.data(), make=st.sampled_from(TRANSFERS))
@settings(max_examples=100, deadline=None)
def test_any_boundaries_between_pieces_give_the_same_weights(data: st.DataObject, make: Make) -> None:
    source, target = Awkward(seed=5), Awkward(seed=6)
    payload = joined(DirectTransfer(ModelTensors(source)).gather_all())
    boundaries = sorted(data.draw(st.sets(st.integers(1, len(payload) - 1), max_size=12)))
    write(make(ModelTensors(target)), payload, boundaries)
    for (name, expected), got in zip(source.state_dict().items(), target.state_dict().values(), strict=True):
        assert torch.equal(expected, got), name
    assert not torch.equal(source.secret, target.secret)
    assert target.head.weight is target.embedding.weight


@pytest.mark.parametrize("make", TRANSFERS)
@pytest.mark.parametrize("piece_bytes", [1, 3, 64, 10_000])
def test_a_payload_without_frozen_tensors_leaves_those(make: Make, piece_bytes: int) -> None:
    """START brings everything, later replies parameters and buffers only; also when a longer payload came before."""
    source, target = Awkward(seed=5), Awkward(seed=6)
    model = ModelTensors(target)
    transfer = make(model)
    write(transfer, joined(DirectTransfer(ModelTensors(Awkward(seed=7))).gather_all()), [])
    frozen = torch.full((4, 4), 9.0)
    with torch.no_grad():
        target.frozen.copy_(frozen)
    payload = joined(DirectTransfer(ModelTensors(source)).gather(ContributionKind.WEIGHTS)[0].pieces)
    write(transfer, payload, list(range(piece_bytes, len(payload), piece_bytes)))
    state = source.state_dict()
    for name, got in target.state_dict().items():
        assert torch.equal(got, frozen if name == "frozen" else state[name]), name


# ---- other memory formats ---------------------------------------------------------------------------


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(5, 3).t())


def test_parameters_in_other_memory_formats_are_staged() -> None:
    module, plain = ChannelsLast(), ChannelsLast()
    model = ModelTensors(module)
    transfer = make_transfer(model)
    assert isinstance(transfer, StagedTransfer)
    assert isinstance(make_transfer(ModelTensors(nn.Linear(2, 2))), DirectTransfer)
    found = tensors_in(model, joined(transfer.gather_all()))
    for name, value in plain.state_dict().items():
        assert torch.equal(found[name], value), name
    strides = [parameter.stride() for parameter in module.parameters()]
    doubled = {name: value * 2 for name, value in found.items()}
    memory = new_payload(model.layout.total_bytes)
    for spec, view in model.layout.views(memory):
        view.copy_(doubled[spec.name])
    write(transfer, bytes(as_bytes(memory)), [])
    for name, value in module.state_dict().items():
        assert torch.equal(value, doubled[name]), name
    assert [parameter.stride() for parameter in module.parameters()] == strides


# ---- what cannot take part ---------------------------------------------------------------------------


def test_a_dtype_that_cannot_be_exchanged() -> None:
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(UsageError, match=r"tensor 'w' is torch\.complex64"):
        ModelTensors(module)


def test_extra_state_is_left_out() -> None:
    class WithExtra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"anything": 1}

        def set_extra_state(self, state: dict[str, int]) -> None: ...

    assert {spec.name for spec in ModelTensors(WithExtra(2, 2)).layout.specs} == {"weight", "bias"}


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_tensors_that_are_left_out_are_as_they_were(transfer: Callable[[ModelTensors], DirectTransfer]) -> None:
    """Also where the transfer is new, and has no memory of what came before."""
    mine, other = ModelTensors(Awkward(0)), ModelTensors(Awkward(1))
    before = [tensor.detach().clone() for tensor in mine.tensors]
    payload = joined(transfer(other).gather_all())
    kept = [entry for entry in mine.layout.entries if entry.num_bytes][1]
    receiving = transfer(mine)
    receiving.write(0, memoryview(payload)[: kept.offset])
    receiving.write(kept.end, memoryview(payload)[kept.end :])
    receiving.finish_write(len(payload), [(kept.offset, kept.end)])
    for entry, found, old, new in zip(mine.layout.entries, mine.tensors, before, other.tensors, strict=True):
        assert torch.equal(found, old if entry is kept else new), entry.spec.name


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_a_shard_with_as_many_bytes_as_the_model_gets_its_own_part(num_shards: int) -> None:
    """The bytes of each part are rounded up, so they may equal the whole's."""
    net = nn.Linear(4, 1, bias=False)
    net.weight = nn.Parameter(torch.zeros(4))
    net.register_buffer("scale", torch.tensor(1.0))
    net.weight.grad = torch.arange(1.0, 5.0)
    model = ModelTensors(net)
    found: list[float] = []
    for share in divide(model.layout, num_shards):
        part = part_of(model, share)
        sources = part.sources(ContributionKind.GRADIENT, range(part.num_exchanged))
        for entry, source in zip(part.layout.entries, sources, strict=False):
            if "weight" in entry.spec.name and source is not None:
                found += source.tolist()
    assert found == [1.0, 2.0, 3.0, 4.0]


def test_copies_of_gradients_that_have_changed_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU. The script clips after backward, and no gradient has been sent yet. The stream is the CPU's."""

    class Stream:
        device = "cuda:0"
        copy = staged.SideStream.copy

        def __init__(self, _tensors: object) -> None: ...
        def copies(self) -> AbstractContextManager[None]:
            return nullcontext()

        def precede(self) -> None: ...
        def event(self) -> SimpleNamespace:
            return SimpleNamespace(synchronize=lambda: None)

        def synchronize(self) -> None: ...
        def new_payload(self, num_bytes: int) -> torch.Tensor:
            return new_payload(num_bytes)

    monkeypatch.setattr(staged, "SideStream", Stream)
    net = nn.Linear(4, 2)
    model = ModelTensors(net)
    transfer = StagedTransfer(model)
    up = Up(RawCodec(), model, transfer, lambda _messages: None)
    up.transport = SimpleNamespace(segment=None, is_beside_stream=False, messages=None)  # type: ignore[assignment]
    net(torch.ones(3, 4)).sum().backward()
    up.prepare([0, 1])
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.01)
    up.recall()
    sent = joined(transfer.gather(ContributionKind.GRADIENT, None)[0].pieces)
    wanted = joined(DirectTransfer(model).gather(ContributionKind.GRADIENT, None)[0].pieces)
    assert sent == wanted
