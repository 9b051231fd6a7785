"""Encodes the weights of a reply in the worker's own codec, where replies are weights and not differences."""

from __future__ import annotations

import torch

from ....common.codecs.base import Codec, FreeBuffers, encode_payload
from ....common.errors import Reason, refusal
from ....common.tensors.layout import Kind, Layout


def encoded_weights(codec: Codec, layout: Layout, free_buffers: FreeBuffers, weights: torch.Tensor) -> torch.Tensor:
    """Encode weights, uint8 [>= exchange_bytes], into a buffer of `free_buffers`, uint8 [payload_bytes].

    Raises a LIMIT_EXCEEDED refusal for weights that would become infinite.
    """
    for run in layout.runs_of(Kind.PARAMETER):
        if codec.largest < torch.finfo(run.dtype).max and run.num_elements:
            largest = max(abs(float(end)) for end in run.view(weights).aminmax())
            if largest > codec.largest:
                raise refusal(
                    Reason.LIMIT_EXCEEDED,
                    f"weights up to {largest:g}, which worker.reply_codec {codec.name} cannot encode (at most "
                    f"{codec.largest:,.0f})",
                    fix="--set worker.reply_codec=bf16, whose range is float32's",
                )
    return encode_payload(codec, layout, weights, free_buffers)
