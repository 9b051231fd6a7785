"""Every transport carries every codec, and an encoder remembers what counts, whatever is lost, refused, dropped or sent
again.

The worker's transports are the real ones; what lies between them and the server's decoding is a list of messages that a
fault may cut off, and hypothesis chooses what goes wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paramserver.common.codecs.base import decode_payload, payload_bytes
from paramserver.common.errors import ParamServerError, Reason
from paramserver.common.kinds import ContributionKind
from paramserver.common.registry import CODECS
from paramserver.common.tensors.layout import as_bytes, new_payload
from paramserver.common.wire.direct import OutOfBand
from paramserver.common.wire.frames import PayloadReader, parse
from paramserver.common.wire.records import WeightsInfo
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.worker.tensors.staged import StagedTransfer, make_transfer
from paramserver.worker.tensors.transfer import ModelTensors
from paramserver.worker.transports.transport import DirectTransport, Down, SharedTransport, Transport, Up

from ..records import contribution_of

ALL_CODECS = CODECS.names()
TRANSPORTS = ["grpc", "shared memory", "direct"]


class Net(nn.Module):
    """Parameters of several shapes, and a buffer."""

    def __init__(self, size: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(size, 7)
        self.norm = nn.BatchNorm1d(7)


class Pair:
    """A worker's two transports to a shard, and what that shard has of them."""

    def __init__(self, codec: str, transport: str = "grpc", staged: bool = False, size: int = 5) -> None:
        torch.manual_seed(1)
        self.net = Net(size)
        self.model = ModelTensors(self.net)
        self.layout = self.model.layout
        self.codec = CODECS.load(codec)()
        transfer: Any = StagedTransfer(self.model) if staged else make_transfer(self.model)
        self.sent: list[bytes] = []
        self.up = Up(self.codec, self.model, transfer, self._send)
        self.down = Down(self.codec, self.model, transfer)
        self.transport: Transport = Transport()
        if transport == "shared memory":
            self.transport = SharedTransport()
            self.transport.segment = new_payload(self.layout.exchange_bytes)
        if transport == "direct":
            self.transport = DirectTransport()
        self.up.joined(self.transport, pb.Welcome())

    def _send(self, frames: Iterable[bytes]) -> None:
        self.sent += frames

    def compute(self, seed: int) -> None:
        """A gradient, of values that the codecs of these tests keep or round."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.net.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.net.norm.running_mean.copy_(torch.randn(7, generator=generator))

    def contribute(self) -> list[bytes]:
        """What the worker sends now."""
        self.sent = []
        self.up.contribute(CONTRIBUTION)
        return self.sent

    def decode(self, frames: list[bytes]) -> torch.Tensor:
        """What the shard makes of it, uint8 [exchange_bytes]."""
        first = parse(pb.WorkerMessage, frames[0])
        arrived = new_payload(first.header.payload.num_bytes)
        target = as_bytes(arrived)

        def write(offset: int, data: memoryview) -> None:
            target[offset : offset + len(data)] = data

        def copy(offset: int, num_bytes: int) -> None:
            if self.transport.segment is None:  # they follow the message
                return
            arrived[offset : offset + num_bytes].copy_(self.transport.segment[offset : offset + num_bytes])

        reader = PayloadReader(
            first.header.payload.num_bytes, write, copy if first.header.payload.in_shared_memory else None
        )
        reader.feed(first)
        for raw in frames[1:]:
            if isinstance(raw, OutOfBand):
                piece, raw = b"".join(raw.pieces), raw.frame
                offset = parse(pb.WorkerMessage, raw).offset
                target[offset : offset + len(piece)] = piece
            reader.feed(parse(pb.WorkerMessage, raw))
        assert reader.is_complete
        if self.codec.is_identity:
            return arrived
        payload = new_payload(self.layout.exchange_bytes)
        decode_payload(self.up.encoding.codec, self.layout, arrived, payload)
        return payload


CONTRIBUTION = contribution_of(1)


# ---- every transport, every codec ---------------------------------------------------------------------------


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("codec", ALL_CODECS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_contributed_arrives_and_what_is_sent_again_is_the_same(
    transport: str, codec: str, staged: bool
) -> None:
    pair = Pair(codec, transport, staged)
    for seed in range(3):
        pair.compute(seed)
        first = pair.contribute()
        pair.up.joined(pair.transport, pb.Welcome())  # the stream was lost
        again = pair.contribute()
        assert again == first
        pair.decode(first)
        payload = pair.decode(again)
        pair.up.replied(pb.Reply.APPLIED)
        assert torch.equal(payload[pair.layout.parameter_bytes :], as_tensor(pair.model, pair.layout.parameter_bytes))


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("codec", ["raw", "bf16", "q4"])
@pytest.mark.parametrize("transport", ["tcp", "direct"])
def test_zeros_do_not_travel_to_a_server_that_knows_of_it(transport: str, codec: str, staged: bool) -> None:
    pair = Pair(codec, transport, staged, size=80_000)
    pair.compute(0)
    pair.net.first.weight.grad = None
    whole, payload = num_bytes(pair.contribute()), pair.decode(pair.sent).clone()
    pair.transport.joined(pb.Welcome(takes_left_out=True), "")
    assert num_bytes(pair.contribute()) < whole / 3
    assert torch.equal(pair.decode(pair.sent), payload)


def num_bytes(frames: list[Any]) -> int:
    return sum(sum(map(len, raw.pieces)) if isinstance(raw, OutOfBand) else len(raw) for raw in frames)


def as_tensor(model: ModelTensors, start: int) -> torch.Tensor:
    """The payload of a gradient from byte `start`, raw."""
    pieces = make_transfer(model).gather(ContributionKind.GRADIENT)[0].pieces
    return torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)[start:]


@pytest.mark.parametrize("codec", ALL_CODECS)
def test_a_payload_of_another_size_or_codec_is_refused_by_the_worker(codec: str) -> None:
    pair = Pair(codec)
    with pytest.raises(ParamServerError) as error:
        pair.down.take(WeightsInfo(payload_bytes(pair.codec, pair.layout) + 1), lambda write: None)
    assert error.value.reason is Reason.BAD_REQUEST
    with pytest.raises(ParamServerError):
        pair.down.take(WeightsInfo(payload_bytes(pair.codec, pair.layout), "another"), lambda write: None)


# ---- an encoder remembers what counts ------------------------------------------------------------------

FATES = ["applied", "applied", "dropped", "rejected", "lost on the way", "reply lost", "start"]


@given(fates=st.lists(st.sampled_from(FATES), max_size=25))
@settings(max_examples=60, deadline=None)
def test_contributions_that_count_are_remembered_once(fates: list[str]) -> None:
    """Residual and factors are those of a worker that sent only what counted."""
    pair, other = Pair("powersgd", size=900), Pair("powersgd", size=900)
    seed = 0
    pair.compute(seed)
    for fate in fates:
        sent = pair.contribute()
        if fate == "lost on the way":
            pair.up.joined(pair.transport, pb.Welcome())
            continue  # resumed: the same contribution again
        if fate == "start":
            for each in (pair, other):
                each.up.replied(pb.Reply.START)
            continue
        outcome = {"applied": "APPLIED", "reply lost": "REPEATED", "dropped": "DROPPED", "rejected": "REJECTED"}[fate]
        if fate == "reply lost":  # and asked for again on a new stream, before anything else
            pair.up.joined(pair.transport, pb.Welcome())
        pair.up.replied(pb.Reply.Outcome.Value(outcome))
        if outcome in ("APPLIED", "REPEATED"):
            other.compute(seed)
            assert other.contribute() == sent
            other.up.replied(pb.Reply.APPLIED)
        mine, others = (each.up.encoding._encoder._q for each in (pair, other))
        assert mine.keys() == others.keys() and all(torch.equal(mine[at], others[at]) for at in mine)
        assert pair.up.encoding.norm == other.up.encoding.norm
        seed += 1
        pair.compute(seed)


def test_weights_in_memory_that_was_not_agreed_on_are_refused() -> None:
    with pytest.raises(ParamServerError, match="was not agreed on") as error:
        Transport().memory(pb.Segment())
    assert error.value.reason is Reason.BAD_REQUEST
