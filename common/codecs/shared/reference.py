"""The reference: a copy of the weights that server and workers update by the same encoded differences, bit for bit.

The server moves the reference r towards its weights w. It sends d = C(w - r) and sets r <- r + D(d), where C encodes
and D decodes. A worker does the second step with the same bytes. Values that d leaves out are part of the next w - r,
so there is no residual. (Preserved central model, as in MCM: Philippenko and Dieuleveut 2021.)
"""

from __future__ import annotations

import math
import zlib

import torch

from ...errors import bad_request
from ...tensors.layout import Kind, Layout, as_bytes
from ..base import Codec
from .by_tensor import ROOM, ByTensor, Piece, PieceEncoder, all_pieces


def moves_reference(codec: Codec | None) -> bool:
    """Whether replies in this codec are differences to a reference, and not weights."""
    return isinstance(codec, ByTensor) and not codec.takes_weights


def approach(
    codec: ByTensor, encoder: PieceEncoder, weights: torch.Tensor, payload: torch.Tensor, out: torch.Tensor
) -> None:
    """Encode the difference of `weights` to the reference `payload` into `out`, and update the reference by it.

    `weights` is uint8 [>= exchange_bytes], `payload` uint8 [exchange_bytes], `out` uint8 [payload_bytes]. The reference
    also takes the buffers. `codec` is the encoder's, or that without some tensors (`only_rest`). `encoder` must be the
    same object at each call. Decoding does not need its memory.
    """
    layout = encoder.layout
    for piece in all_pieces(codec, layout):
        known = piece.of_payload(payload)
        difference = torch.sub(piece.of_payload(weights), known, out=ROOM.of("difference", known.shape, known.dtype))
        encoder.write(piece, difference, out)
        _move(codec, piece, out, known)
    encoder.commit()
    encoded_bytes, buffers = codec.encoded_bytes(layout), slice(layout.parameter_bytes, layout.exchange_bytes)
    payload[buffers].copy_(weights[buffers])
    out[encoded_bytes:].copy_(weights[buffers])


def follow(codec: ByTensor, layout: Layout, encoded: torch.Tensor, payload: torch.Tensor) -> None:
    """Update the reference `payload` by the bytes that `approach` made.

    Raises a BAD_REQUEST refusal for bytes that cannot be decoded. `payload` is then partly updated.
    """
    try:
        for piece in all_pieces(codec, layout):
            _move(codec, piece, encoded, piece.of_payload(payload))
    except Exception as error:
        raise bad_request(f"codec '{codec.name}' cannot decode: {type(error).__name__}: {error}") from error
    payload[layout.parameter_bytes : layout.exchange_bytes].copy_(encoded[codec.encoded_bytes(layout) :])


def check_sum(layout: Layout, payload: torch.Tensor) -> int:
    """Return the CRC-32 of the parameters."""
    return zlib.crc32(as_bytes(payload)[: layout.parameter_bytes])


def distance(layout: Layout, weights: torch.Tensor, payload: torch.Tensor) -> float:
    """Return norm(weights - reference) / norm(weights) of the parameters, or 0 if all weights are 0."""
    squared = total = 0.0
    for run in layout.runs_of(Kind.PARAMETER):
        values = run.view(weights)
        squared += float((values - run.view(payload)).double().norm()) ** 2
        total += float(values.double().norm()) ** 2
    return math.sqrt(squared / total) if total else 0.0


def _move(codec: ByTensor, piece: Piece, encoded: torch.Tensor, values: torch.Tensor) -> None:
    decoded = ROOM.of("of what is sent", values.shape, values.dtype)
    codec.read(piece, encoded, decoded)
    values.add_(decoded)
