"""Payloads in a codec: the memory they are made in is kept from one exchange to the next."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from paramserver.common.codecs.base import FreeBuffers, decode_payload, payload_bytes
from paramserver.common.codecs.bf16 import Bf16Codec
from paramserver.common.codecs.fp16 import Fp16Codec
from paramserver.common.codecs.raw import ENTRY as Raw
from paramserver.common.errors import ParamServerError
from paramserver.common.kinds import ContributionKind
from paramserver.common.registry import CODECS
from paramserver.common.tensors.layout import as_bytes, new_payload
from paramserver.common.wire.frames import PayloadReader, parse
from paramserver.common.wire.records import WeightsInfo
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.tensors.replies import encoded_weights
from paramserver.worker.strategies import base
from paramserver.worker.strategies.base import EarlySender
from paramserver.worker.tensors.staged import StagedTransfer, make_transfer
from paramserver.worker.tensors.transfer import ModelTensors
from paramserver.worker.transports.transport import Down, SharedTransport, Transport, Up, between

from ..records import contribution_of

SHORT_FLOATS = [Bf16Codec, Fp16Codec]


def model() -> tuple[nn.Module, ModelTensors]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.Linear(50, 3).double())
    return net, ModelTensors(net)


@pytest.mark.parametrize("kind", SHORT_FLOATS)
def test_exchanges_use_the_same_memory(kind: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways, three times: the values are those rounded once, and nothing is made anew after the first."""
    net, tensors = model()
    transfer, codec = make_transfer(tensors), kind()
    made: list[int] = []
    for where in ("common.codecs.base", "worker.transports.encoding"):
        monkeypatch.setattr(
            f"paramserver.{where}.new_payload", lambda num: made.append(num) or new_payload(num)  # type: ignore[func-returns-value]
        )  # fmt: skip
    up, down = Up(codec, tensors, transfer, lambda frames: None), Down(kind(), tensors, transfer)
    free_buffers, num_made = FreeBuffers(), 0
    for number in range(3):
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        assert up.encoding.payload is None
        sent = up.encoding.whole(transfer.gather(ContributionKind.GRADIENT)[0])
        assert up.encoding.payload == sent, "what was not replied is sent as it was"
        payload = new_payload(tensors.layout.exchange_bytes)
        decode_payload(codec, tensors.layout, torch.frombuffer(bytearray(sent), dtype=torch.uint8), payload)
        up.replied(pb.Reply.APPLIED)
        encoded = encoded_weights(codec, tensors.layout, free_buffers, payload)
        data = memoryview(encoded.numpy())

        def receive(write: Callable[[int, memoryview], None], data: memoryview = data) -> None:
            write(0, data[:100])
            write(100, data[100:])

        down.take(WeightsInfo(len(data), codec.name), receive)
        free_buffers.give_back(encoded)
        for parameter in net.parameters():
            assert parameter.grad is not None
            assert torch.equal(parameter, parameter.grad.to(codec.fallback_dtype).to(parameter.dtype)), number
        num_made = len(made) if number == 0 else num_made
        assert len(made) == num_made, "new memory"


def test_buffers_free_are_of_the_size_asked_for_and_few() -> None:
    free_buffers = FreeBuffers(2)
    payloads = [free_buffers.lend(10) for _ in range(4)]
    for payload in payloads:
        free_buffers.give_back(payload)
    assert {id(free_buffers.lend(10)), id(free_buffers.lend(10))} == {id(payloads[0]), id(payloads[1])}
    free_buffers.give_back(payloads[0])
    assert free_buffers.lend(11).numel() == 11


def test_weights_that_fp16_cannot_hold_are_refused() -> None:
    _, tensors = model()
    payload = new_payload(tensors.layout.total_bytes)
    tensors.layout.runs_of(tensors.layout.entries[0].spec.kind)[0].view(payload)[7] = -70_000.0
    with pytest.raises(ParamServerError, match=r"weights up to 70000, which worker.reply_codec fp16 .* 65,504"):
        encoded_weights(Fp16Codec(), tensors.layout, FreeBuffers(), payload)
    encoded_weights(Bf16Codec(), tensors.layout, FreeBuffers(), payload)


# ---- test early -----------------------------------------------------------------------------------------

# Gradients that leave during backward: what arrives is what `step()` was called with, whatever the loop did.


class Receiver:
    """The part of an exchange that sends, and at its other end a payload as the server collects it."""

    def __init__(self, model: ModelTensors, transport: str, staged: bool = False, codec: str = "raw") -> None:
        self.model = model
        self.transfer: Any = StagedTransfer(model) if staged else make_transfer(model)
        self.payload = new_payload(payload_bytes(CODECS.load(codec)(), model.layout))
        self.num_begun = 0
        self._has_begun = False
        way: Transport = Transport()
        if transport == "shared memory":
            way = SharedTransport()
            way.segment = self.payload
        self._is_out_of_band = way.segment is not None
        self.up = Up(CODECS.load(codec)(), model, self.transfer, self._come)
        self.up.encoding.ready(1)  # 1-bit Adam after its warm-up
        self.up.joined(way, pb.Welcome())
        self.shards = self.up
        self._begin()

    def _begin(self) -> None:
        target = as_bytes(self.payload)

        def write(offset: int, data: memoryview) -> None:
            target[offset : offset + len(data)] = data

        new_position = (lambda offset, num_bytes: None) if self._is_out_of_band else None
        self.reader = PayloadReader(len(target), write, new_position)

    def contribute(self) -> torch.Tensor:
        """The rest; returns the payload that arrived."""
        self.up.contribute(CONTRIBUTION)
        assert self.reader.is_complete
        return self.payload.clone()

    def _come(self, frames: Iterable[bytes]) -> None:
        for raw in frames:
            received = parse(pb.WorkerMessage, raw)
            if received.kind == "begin":
                self.num_begun += 1
                self._has_begun = True
                self._begin()
            elif received.kind == "contribution":
                if not self._has_begun:
                    self._begin()
                self._has_begun = False
            self.reader.feed(received)


CONTRIBUTION = contribution_of(1)


class Net(nn.Module):
    """Several dtypes, a buffer, a frozen tensor, a layer that no loss reaches, a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(20, 36)
        self.norm = nn.BatchNorm1d(36)
        self.twice = nn.Linear(36, 36)
        self.unused = nn.Linear(7, 3)
        self.last = nn.Linear(36, 2).double()
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        return self.last(self.twice(torch.tanh(self.twice(x))).double())


def backward(net: Net, seed: int) -> None:
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(seed))
    net(x).square().mean().backward()


def plain(net: Net, step: int) -> None:
    net.zero_grad()
    backward(net, step)


def kept_memory(net: Net, step: int) -> None:
    net.zero_grad(set_to_none=False)
    backward(net, step)


def clipped(net: Net, step: int) -> None:
    plain(net, step)
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)


def accumulated(net: Net, step: int) -> None:
    plain(net, step)
    backward(net, step + 100)


def replaced(net: Net, step: int) -> None:
    plain(net, step)
    net.twice.weight.grad = torch.full_like(net.twice.weight, 3.0)


def dropped(net: Net, step: int) -> None:
    plain(net, step)
    net.last.weight.grad = None


def scaled_late(net: Net, step: int) -> None:
    plain(net, step)
    if step == 2:
        with torch.no_grad():
            net.first.weight.grad.mul_(2.0)  # type: ignore[union-attr]


def without_backward(net: Net, step: int) -> None:
    if step != 1:
        plain(net, step)


LOOPS: list[Callable[[Net, int], None]] = [
    plain, kept_memory, clipped, accumulated, replaced, dropped, scaled_late, without_backward,
]  # fmt: skip
STAYS_ON = {"plain", "kept_memory", "without_backward"}


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("transport", ["tcp", "shared memory"])
@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_what_arrives_is_what_step_was_called_with(
    loop: Callable[[Net, int], None], transport: str, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_BUCKET_BYTES", 1000)
    net, twin = Net(), Net()
    tensors = ModelTensors(net)
    receiver = Receiver(tensors, transport, staged)
    sender = EarlySender(receiver, tensors)  # type: ignore[arg-type]
    expected_from = make_transfer(ModelTensors(twin))
    for step in range(4):
        loop(net, step)
        loop(twin, step)
        sender.settle()
        arrived = receiver.contribute()
        assert bytes(arrived.numpy()) == b"".join(expected_from.gather(ContributionKind.GRADIENT)[0].pieces), (
            f"step {step}"
        )
    assert receiver.num_begun > 0, "nothing left early: this test shows nothing"
    assert bool(sender._hooks) == (loop.__name__ in STAYS_ON)


@pytest.mark.parametrize("codec", CODECS.names())
@pytest.mark.parametrize("loop", [plain, clipped, scaled_late], ids=lambda loop: loop.__name__)
def test_what_is_encoded_as_it_comes_is_what_is_encoded_whole(
    loop: Callable[[Net, int], None], codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what was left out of the contributions before, also where one is encoded again, or does not count."""
    monkeypatch.setattr(base, "_BUCKET_BYTES", 1000)
    net, twin = Net(), Net()
    ahead, whole = (Receiver(ModelTensors(item), "tcp", codec=codec) for item in (net, twin))
    sender = EarlySender(ahead, ahead.model)  # type: ignore[arg-type]
    for step, outcome in enumerate([pb.Reply.APPLIED, pb.Reply.REJECTED, pb.Reply.START, pb.Reply.APPLIED] * 2):
        loop(net, step)
        loop(twin, step)
        sender.settle()
        assert torch.equal(ahead.contribute(), whole.contribute()), f"step {step}"
        ahead.up.replied(outcome)
        whole.up.replied(outcome)
    assert ahead.num_begun > 0, "nothing left early: this test shows nothing"
    assert bool(sender._hooks) == (loop.__name__ in STAYS_ON)


def test_the_last_layer_leaves_first_and_before_backward_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_BUCKET_BYTES", 1)
    net = Net()
    tensors = ModelTensors(net)
    receiver = Receiver(tensors, "tcp")
    EarlySender(receiver, tensors)  # type: ignore[arg-type]
    left_before_first: list[set[str]] = []
    net.first.weight.register_hook(
        lambda _: left_before_first.append({tensors.layout.entries[i].spec.name for i in receiver.up.departed})
    )
    plain(net, 0)
    assert left_before_first == [{"last.weight", "last.bias", "twice.weight", "twice.bias", "norm.weight", "norm.bias"}]


def test_a_placed_gradient_stays_in_the_segment() -> None:
    """A backward that accumulates into the same gradients does so there from the third step on."""
    net = Net()
    receiver = Receiver(ModelTensors(net), "shared memory")
    for step in range(2):
        kept_memory(net, step)
        receiver.contribute()
    segment = receiver.up.transport.segment
    assert segment is not None
    start, end = segment.data_ptr(), segment.data_ptr() + segment.numel()
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    assert gradients and all(start <= gradient.data_ptr() < end for gradient in gradients)


# ---- test partial transfer ------------------------------------------------------------------------------

# What of a contribution is sent where the server has some of it.


NUM = 600_000


@pytest.mark.parametrize(("start", "end"), [(0, 0), (0, 10), (3, 7), (4, 5), (9, 10), (5, 10), (8, 99), (99, 10)])
def test_pieces_are_cut_at_the_borders(start: int, end: int) -> None:
    payload = memoryview(bytes(range(10)))
    parts = between([payload[:4], payload[4:5], payload[5:]], start, end)
    assert b"".join(parts) == bytes(payload)[start:end] and all(parts)


def sent(offered: pb.PartialTransfer) -> list[Any]:
    """The frames of a contribution of ones, where the server says that it has this."""
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(NUM))
    model.w.grad = torch.ones(NUM)
    frames: list[Any] = []
    tensors = ModelTensors(model)
    up = Up(
        Raw(), tensors, make_transfer(tensors), lambda raws: frames.extend(parse(pb.WorkerMessage, r) for r in raws)
    )
    up.joined(Transport(), pb.Welcome(partial_transfer=offered))

    up.contribute(contribution_of(4))
    again = len(frames)
    up.contribute(contribution_of(4))
    assert frames[again].kind == "contribution", "a partial transfer is good for one attempt"
    return frames[:again]


def offered_ones(**otherwise: Any) -> pb.PartialTransfer:
    crc = zlib.crc32(bytes(as_bytes(torch.ones(100_000))))
    fields = {
        "seq": 4, "payload_bytes": 4 * NUM, "codec": "raw", "ranges": [0, 200_000, 800_000, 1_000_000], "crc": crc,
    }  # fmt: skip
    return pb.PartialTransfer(**fields | otherwise)


def test_what_the_server_has_is_not_sent() -> None:
    begin, facts, *pieces = sent(offered_ones())
    assert begin.header.continues == facts.header.seq == 4
    came = sorted((piece.offset, piece.offset + len(piece.data)) for piece in pieces)
    assert (came[0], came[1][0], came[-1][1]) == ((200_000, 800_000), 1_000_000, 4 * NUM)
    assert sum(end - start for start, end in came) == 4 * NUM - 400_000


@pytest.mark.parametrize("otherwise", [{"crc": 1}, {"seq": 3}, {"payload_bytes": 8}, {"codec": "bf16"}])
def test_all_is_sent_where_it_has_something_else(otherwise: dict[str, Any]) -> None:
    facts, *pieces = sent(offered_ones(**otherwise))
    assert facts.kind == "contribution"
    assert sum(len(piece.data) for piece in pieces) == 4 * NUM
