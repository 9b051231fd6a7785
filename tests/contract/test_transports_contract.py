"""Every transport carries every codec, and memories on both sides agree whatever is lost, refused, dropped or sent
again.

The worker's transports and the server's memory are the real ones; what lies between them is a list of messages that a
fault may cut off, and hypothesis chooses what goes wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paramserver.common.codecs.base import payload_bytes
from paramserver.common.errors import ParamServerError, Reason
from paramserver.common.kinds import ContributionKind
from paramserver.common.registry import CODECS
from paramserver.common.tensors.layout import as_bytes, new_payload
from paramserver.common.wire.direct import OutOfBand
from paramserver.common.wire.frames import PayloadReader, parse
from paramserver.common.wire.records import WeightsInfo
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.tensors.codec_memory import CodecMemory
from paramserver.worker.tensors.staged import StagedTransfer, make_transfer
from paramserver.worker.tensors.transfer import ModelTensors
from paramserver.worker.transports.down import Down
from paramserver.worker.transports.transport import DirectTransport, SharedTransport, Transport
from paramserver.worker.transports.up import Up

from ..records import contribution_of

sys.path.insert(0, str(Path(__file__).parent / "added"))
from delta import DeltaCodec

ALL_CODECS = [*CODECS.names(), "delta"]
TRANSPORTS = ["grpc", "shared memory", "direct"]


def codec_of(name: str) -> Any:
    return DeltaCodec() if name == "delta" else CODECS.load(name)()


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
        self.codec = codec_of(codec)
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
        self.up.joined(self.transport)
        self.memory = CodecMemory(self.layout)

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

        def place(offset: int, num_bytes: int) -> None:
            if self.transport.segment is None:  # they follow the message
                return
            arrived[offset : offset + num_bytes].copy_(self.transport.segment[offset : offset + num_bytes])

        reader = PayloadReader(
            first.header.payload.num_bytes, write, place if first.header.payload.in_shared_memory else None
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
        self.memory.take(self.up.encoding.codec, arrived, payload)
        return payload

    def reply(self, weights: torch.Tensor) -> torch.Tensor:
        """The shard's reply as it travels, uint8."""
        return weights if self.codec.is_identity else self.memory.encode(self.codec, weights)

    def take(self, reply: torch.Tensor, break_off: bool = False) -> None:
        """It comes to the worker, or half of it does."""

        def receive(write: Any) -> None:
            middle = len(reply) // 2
            write(0, as_bytes(reply)[:middle])
            if break_off:
                raise ConnectionError
            write(middle, as_bytes(reply)[middle:])

        self.down.take(WeightsInfo(len(reply), "" if self.codec.is_identity else self.codec.name), receive)

    def restart(self) -> None:
        """The worker is told to start: both sides begin with nothing."""
        self.up.replied(pb.Reply.START)
        self.down.started()
        self.memory = CodecMemory(self.layout)


CONTRIBUTION = contribution_of(1)


def weights_of(layout: Any, seed: int) -> torch.Tensor:
    payload = new_payload(layout.exchange_bytes)
    generator = torch.Generator().manual_seed(seed)
    for entry, (spec, view) in zip(layout.entries, layout.views(new_padded(layout, payload)), strict=False):
        if entry.end <= layout.exchange_bytes and view.is_floating_point():
            payload[entry.offset : entry.end].view(torch.float32).copy_(
                torch.randn(max(1, spec.num_elements), generator=generator)
            )
    return payload


def new_padded(layout: Any, payload: torch.Tensor) -> torch.Tensor:
    """`payload` with room for what is never exchanged."""
    return torch.cat([payload, new_payload(layout.total_bytes - layout.exchange_bytes)])


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
        pair.up.joined(pair.transport)  # the stream was lost
        again = pair.contribute()
        assert again == first
        pair.decode(first)
        payload = pair.decode(again)
        pair.memory.end_attempt(True)
        pair.up.replied(pb.Reply.APPLIED)
        assert torch.equal(payload[pair.layout.parameter_bytes :], as_tensor(pair.model, pair.layout.parameter_bytes))


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("codec", ["raw", "bf16", "q4", "delta"])
@pytest.mark.parametrize("transport", ["tcp", "direct"])
def test_zeros_do_not_travel_to_a_server_that_knows_of_it(transport: str, codec: str, staged: bool) -> None:
    pair = Pair(codec, transport, staged, size=80_000)
    pair.compute(0)
    pair.net.first.weight.grad = None
    whole, payload = num_bytes(pair.contribute()), pair.decode(pair.sent).clone()
    pair.transport.joined(pb.Welcome(takes_left_out=True))
    assert num_bytes(pair.contribute()) < (whole if codec == "delta" else whole / 3)
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


# ---- memories agree, whatever happens ------------------------------------------------------------------

UP_FATES = ["applied", "applied", "dropped", "rejected", "lost on the way", "withdrawn", "reply lost", "start"]
DOWN_FATES = ["taken", "taken", "broken off", "never came", "taken, then reset", "start"]


def memories(pair: Pair) -> tuple[Any, Any]:
    encoder, decoder = pair.up.encoding._coder, pair.memory._decoders.get("delta")
    return encoder, decoder


@given(fates=st.lists(st.sampled_from(UP_FATES), max_size=25))
@settings(max_examples=60, deadline=None)
def test_contributions_are_remembered_once_on_both_sides(fates: list[str]) -> None:
    pair = Pair("delta")
    seed = 0
    pair.compute(seed)
    for fate in fates:
        frames = pair.contribute()
        if fate != "lost on the way":
            payload = pair.decode(frames)
        if fate in ("lost on the way", "withdrawn"):
            pair.memory.end_attempt(False)
            pair.up.joined(pair.transport)
            continue  # resumed: the same contribution again
        if fate == "start":
            pair.memory.end_attempt(False)
            pair.restart()
            continue
        is_folded = fate in ("applied", "reply lost")
        pair.memory.end_attempt(is_folded)
        outcome = {"applied": "APPLIED", "reply lost": "REPEATED", "dropped": "DROPPED", "rejected": "REJECTED"}[fate]
        if fate == "reply lost":  # and asked for again on a new stream, before anything else
            pair.memory.end_attempt(False)
            pair.up.joined(pair.transport)
        pair.up.replied(pb.Reply.Outcome.Value(outcome))
        encoder, decoder = memories(pair)
        assert encoder.num_counted == decoder.num_counted
        for mine, theirs in zip(encoder.values, decoder.values, strict=True):
            assert torch.equal(mine, theirs)
        if is_folded:  # what was folded is what the worker believes it is
            for run, mine in zip(encoder.runs, encoder.values, strict=True):
                assert torch.equal(run.view(payload), mine)
        seed += 1
        pair.compute(seed)


@given(fates=st.lists(st.sampled_from(DOWN_FATES), max_size=25))
@settings(max_examples=60, deadline=None)
def test_replies_are_remembered_once_on_both_sides(fates: list[str]) -> None:
    pair = Pair("delta")
    for seed, fate in enumerate(fates):
        if fate == "start":
            pair.restart()
            continue
        reply = pair.reply(weights_of(pair.layout, seed))
        if fate == "broken off":
            with pytest.raises(ConnectionError):
                pair.take(reply, break_off=True)
        elif fate != "never came":
            pair.take(reply)
        if fate != "taken":  # the stream is lost, the process resumes
            pair.memory.resumed(pair.down.num_taken)
        if fate.startswith("taken"):
            decoder: Any = pair.down._decoder
            weights = torch.cat([parameter.detach().reshape(-1) for parameter in pair.net.parameters()])
            assert torch.equal(weights, torch.cat(decoder.values))


# ---- what cannot be decoded ----------------------------------------------------------------------------


def test_bytes_that_no_encoder_made_are_a_refusal_and_nothing_is_remembered() -> None:
    pair = Pair("delta")
    pair.compute(0)
    spoiled = new_payload(payload_bytes(pair.codec, pair.layout))
    spoiled[0] = 9
    with pytest.raises(ParamServerError, match="codec 'delta' cannot decode") as error:
        pair.memory.take(pair.codec, spoiled, new_payload(pair.layout.exchange_bytes))
    assert error.value.reason is Reason.BAD_REQUEST
    pair.decode(pair.contribute())
    pair.memory.end_attempt(True)
    pair.up.replied(pb.Reply.APPLIED)
    encoder, decoder = memories(pair)
    assert encoder.num_counted == decoder.num_counted == 1


def test_weights_in_memory_that_was_not_agreed_on_are_refused() -> None:
    with pytest.raises(ParamServerError, match="was not agreed on") as error:
        Transport().memory(pb.Segment())
    assert error.value.reason is Reason.BAD_REQUEST
