"""One payload that a server and its workers move by the same encoded differences, so that all have the same bits.

The server moves it towards its weights, w: d = C(w - r) is what it sends, and r <- r + D(d). A worker does the second
half with the bytes it gets. What a d leaves out is in the next w - r: nothing is kept for it (a preserved central
model, as in MCM; Philippenko and Dieuleveut 2021).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import torch

from ...errors import Reason, refusal
from ...tensors.layout import Kind, Layout, as_bytes
from ..base import Codec
from .by_tensor import ROOM, ByTensor, Piece, PieceEncoder, pieces_of


def moves_reference(codec: Codec | None) -> bool:
    """Replies in it are differences of a reference, and not weights."""
    return isinstance(codec, ByTensor) and not codec.takes_weights


def approach(
    codec: ByTensor,
    encoder: PieceEncoder,
    layout: Layout,
    weights: torch.Tensor,
    payload: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The difference of `weights`, uint8 [>= exchange_bytes], to `payload`, uint8 [exchange_bytes], into `out`, uint8
    [payload_bytes]; `payload` is moved by what it decodes to, and takes the buffers. `encoder` is the codec's, the same
    each time: what it remembers of earlier ones need not be known to decode."""
    for piece in _pieces(codec, layout):
        known = piece.of_payload(payload)
        difference = torch.sub(piece.of_payload(weights), known, out=ROOM.of("difference", known.shape, known.dtype))
        encoder.write(piece, difference, out)
        _move(codec, piece, out, known)
    encoder.commit()
    encoded_bytes, buffers = codec.encoded_bytes(layout), slice(layout.parameter_bytes, layout.exchange_bytes)
    payload[buffers].copy_(weights[buffers])
    out[encoded_bytes:].copy_(weights[buffers])


def follow(codec: ByTensor, layout: Layout, encoded: torch.Tensor, payload: torch.Tensor) -> None:
    """As `approach`, with what it made. Refuses BAD_REQUEST what cannot be decoded; `payload` is torn then."""
    try:
        for piece in _pieces(codec, layout):
            _move(codec, piece, encoded, piece.of_payload(payload))
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise refusal(Reason.BAD_REQUEST, f"codec '{codec.name}' cannot decode: {cause}") from error
    payload[layout.parameter_bytes : layout.exchange_bytes].copy_(encoded[codec.encoded_bytes(layout) :])


def check_sum(layout: Layout, payload: torch.Tensor) -> int:
    """CRC-32 of the parameters."""
    return zlib.crc32(as_bytes(payload)[: layout.parameter_bytes])


def distance(layout: Layout, weights: torch.Tensor, payload: torch.Tensor) -> float:
    """norm(weights - reference) / norm(weights), of the parameters; 0 where all weights are 0."""
    squared = total = 0.0
    for run in layout.runs_of(Kind.PARAMETER):
        values = run.view(weights)
        squared += float((values - run.view(payload)).double().norm()) ** 2
        total += float(values.double().norm()) ** 2
    return math.sqrt(squared / total) if total else 0.0


def _pieces(codec: ByTensor, layout: Layout) -> Iterator[Piece]:
    return (piece for pieces in pieces_of(codec, layout) for piece in pieces)


def _move(codec: ByTensor, piece: Piece, encoded: torch.Tensor, values: torch.Tensor) -> None:
    decoded = ROOM.of("of what is sent", values.shape, values.dtype)
    codec.read(piece, encoded, decoded)
    values.add_(decoded)
