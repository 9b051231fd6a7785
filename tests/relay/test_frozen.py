"""A region whose model has tensors that nobody trains: a payload does not have them."""

from __future__ import annotations

import torch

from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.relay.region import RegionTensors

LAYOUT = Layout(
    [
        TensorSpec("frozen", Kind.FROZEN, "float32", (3,)),
        TensorSpec("weight", Kind.PARAMETER, "float32", (2,)),
        TensorSpec("left_out", Kind.PARAMETER, "float32", (1,)),
        TensorSpec("mean", Kind.BUFFER, "float32", (1,)),
    ]
)


def test_a_payload_of_exchanged_tensors_gives_gradients_and_buffers() -> None:
    tensors = RegionTensors(LAYOUT, torch.zeros(LAYOUT.total_bytes, dtype=torch.uint8))
    payload = torch.zeros(LAYOUT.exchange_bytes, dtype=torch.uint8)
    of_name = dict(zip((entry.spec.name for entry in LAYOUT.entries), tensors.tensors, strict=True))
    for entry in LAYOUT.entries:
        if entry.spec.kind is not Kind.FROZEN:
            entry.view(payload).fill_(5.0)
    tensors.set_gradients(payload, {"left_out"})
    assert of_name["weight"].grad is not None and of_name["weight"].grad.tolist() == [5.0, 5.0]
    assert of_name["left_out"].grad is None and of_name["frozen"].grad is None
    assert of_name["mean"].item() == 5.0
    tensors.set_gradients(None, ())
    assert of_name["weight"].grad is None
