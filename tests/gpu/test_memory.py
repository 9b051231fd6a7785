"""What stands between a GPU and the network: pinned memory and its release, and codecs on CUDA gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paramserver.common.registry import CODECS
from paramserver.common.tensors.layout import new_payload
from paramserver.worker.tensors.staged import StagedTransfer, make_transfer
from paramserver.worker.tensors.transfer import ModelTensors

pytestmark = pytest.mark.gpu


def model_on(device: str) -> nn.Module:
    """The same weights and gradients on every device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 33), nn.BatchNorm1d(33))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters()]
    model.to(device)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient.to(device)
    return model


def gathered(device: str, source: str) -> torch.Tensor:
    """The payload as it leaves this device, uint8."""
    tensors = ModelTensors(model_on(device))
    transfer = make_transfer(tensors)
    assert isinstance(transfer, StagedTransfer) == (device == "cuda")
    payload = b"".join(bytes(piece) for stretch in transfer.gather(source) for piece in stretch.pieces)
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


@pytest.mark.parametrize("source", ["gradient", "weights"])
def test_a_payload_of_a_gpu_is_that_of_a_cpu_to_the_bit(device: str, source: str) -> None:
    assert torch.equal(gathered(device, source), gathered("cpu", source))


@pytest.mark.parametrize("name", CODECS.names())
def test_a_codec_encodes_gradients_of_a_gpu_to_the_bits_of_a_cpu(device: str, name: str) -> None:
    """The codec sees a copy in host memory: the tolerance is zero."""
    found = []
    for where in (device, "cpu"):
        layout = ModelTensors(model_on(where)).layout
        payload = gathered(where, "gradient")
        codec = CODECS.load(name)()
        encoded = torch.zeros(codec.encoded_bytes(layout), dtype=torch.uint8)
        codec.encoder(layout).begin(payload, encoded)
        found.append(encoded)
    assert torch.equal(*found)


def test_weights_that_arrive_are_on_the_device(device: str) -> None:
    """Also twice in a row: the second must not overwrite what the first copy still reads."""
    model = model_on(device)
    tensors = ModelTensors(model)
    transfer = make_transfer(tensors)
    for value in (0.25, -3.0):
        payload = new_payload(tensors.layout.total_bytes)
        for _, view in tensors.layout.views(payload):
            view.fill_(value)
        transfer.write(0, memoryview(payload.numpy()))
        transfer.finish_write(tensors.layout.total_bytes)
        for parameter in model.parameters():
            assert parameter.device.type == device
            assert torch.equal(parameter.detach().cpu(), torch.full(parameter.shape, value))


def test_staging_buffers_are_pinned(cuda: None) -> None:
    transfer = make_transfer(ModelTensors(model_on("cuda")))
    assert isinstance(transfer, StagedTransfer)
    assert transfer._out.is_pinned() and transfer._in.is_pinned()


def test_a_segment_is_pinned_while_it_is_used_and_released_after(cuda: None) -> None:
    tensors = ModelTensors(model_on("cuda"))
    transfer, segment = make_transfer(tensors), new_payload(tensors.layout.total_bytes)
    assert isinstance(transfer, StagedTransfer) and not segment.is_pinned()
    list(transfer.gather_into("gradient", segment))
    assert transfer._pinned is not None and transfer._pinned.is_pinned and segment.is_pinned()
    transfer.leave_segment()
    assert not segment.is_pinned(), "the driver keeps the pages"
    list(transfer.gather_into("gradient", segment))  # and again: a segment that is left may be taken once more
    transfer.leave_segment()
    assert not segment.is_pinned()


def test_gradients_that_leave_early_are_those_that_leave_at_once(cuda: None) -> None:
    tensors = ModelTensors(model_on("cuda"))
    transfer, segment = make_transfer(tensors), new_payload(tensors.layout.total_bytes)
    last = list(range(tensors.num_exchanged))[-2:]
    assert transfer.prepare(last, segment)
    list(transfer.gather_into("gradient", segment, last))
    whole = new_payload(tensors.layout.total_bytes)
    list(make_transfer(tensors).gather_into("gradient", whole))
    for index in last:
        entry = tensors.layout.entries[index]
        assert torch.equal(segment[entry.offset : entry.end], whole[entry.offset : entry.end])
    transfer.leave_segment()
