"""Payloads in a codec: the memory they are made in is kept from one exchange to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paramserver.common.codecs.base import FreeBuffers, decode_payload
from paramserver.common.codecs.bf16 import Bf16Codec
from paramserver.common.codecs.fp16 import Fp16Codec
from paramserver.common.errors import ParamServerError
from paramserver.common.kinds import ContributionKind
from paramserver.common.tensors.layout import new_payload
from paramserver.common.wire.records import WeightsInfo
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.tensors.replies import encoded_weights
from paramserver.worker.tensors.staged import make_transfer
from paramserver.worker.tensors.transfer import ModelTensors
from paramserver.worker.transports.transport import Down, Up

CODECS = [Bf16Codec, Fp16Codec]


def model() -> tuple[nn.Module, ModelTensors]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.Linear(50, 3).double())
    return net, ModelTensors(net)


@pytest.mark.parametrize("kind", CODECS)
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
