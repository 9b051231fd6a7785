"""Interface of a codec: one side encodes the parameters of a payload, the other decodes them.

A decoder has no memory, so every payload is decoded by itself. An encoder may have memory, such as its last payload,
although a payload may be lost. So each payload is an attempt in two steps. `begin` encodes, and leaves the memory
unchanged. `commit` updates the memory, if the other side counts the payload; otherwise `rollback` discards the attempt.
A payload that is sent again has the same bytes and is not encoded again.

Each file of this folder is a codec, and `ENTRY` names its class. The class attributes state what the codec can do.
common/combinations.py lists the modes and optimizers that it cannot be used with.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import suppress

import torch

from ..errors import bad_request
from ..tensors.layout import Layout, new_payload


class Codec(ABC):
    """Encodes the parameters of a payload, bytes [0, layout.parameter_bytes). Buffers are sent unchanged."""

    name: str
    # The encoded bytes equal the payload's bytes, so payloads are read and written in place.
    is_identity: bool = False
    # Larger values become infinite, even if the payload's dtype can represent them.
    largest: float = math.inf
    # The worker adds the residual, multiplied by `decay`, to the next contribution (error feedback).
    has_feedback: bool = False
    decay: float = 1.0
    # Replies may be weights in this codec, and not only differences to a reference.
    takes_weights: bool = True
    # Whether the server's outer optimizer may have momentum. A sparse codec sends most values of a difference late.
    suits_outer_momentum: bool = True

    @abstractmethod
    def encoded_bytes(self, layout: Layout) -> int:
        """Return the number of encoded bytes, which is the same for every payload of this layout."""

    @abstractmethod
    def encode(self, layout: Layout, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Encode a payload, uint8 [>= parameter_bytes], into uint8 [encoded_bytes]. The payload stays unchanged."""

    @abstractmethod
    def decode(self, layout: Layout, encoded: torch.Tensor, payload: torch.Tensor) -> None:
        """Decode uint8 [encoded_bytes]. It may raise any exception for bytes that no encoder makes."""

    def encoder(self, layout: Layout) -> Encoder:
        """Return a new encoder with empty memory."""
        return Encoder(self, layout)


class Encoder:
    """Encodes the payloads of one worker, one attempt after another. This one has no memory; subclasses may have."""

    def __init__(self, codec: Codec, layout: Layout) -> None:
        self.codec, self.layout = codec, layout

    def begin(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Encode as `Codec.encode` does."""
        self.codec.encode(self.layout, payload, out)

    def commit(self) -> None:
        """Keep the new memory, because the other side counts the payload."""

    def rollback(self) -> None:
        """Discard the attempt, because the other side will never count the payload."""


class FreeBuffers:
    """A thread-safe pool of payload buffers. The first touch of 100 MB of new memory costs more than writing it.

    `limit`: the most buffers that the pool keeps.
    """

    def __init__(self, limit: int = 1) -> None:
        self._limit = limit
        self._idle: list[torch.Tensor] = []

    def lend(self, num_bytes: int) -> torch.Tensor:
        """Return a buffer, uint8 [num_bytes], with old contents."""
        while self._idle:
            with suppress(IndexError):
                payload = self._idle.pop()
                if payload.numel() == num_bytes:
                    return payload
        return new_payload(num_bytes)

    def give_back(self, payload: torch.Tensor) -> None:
        """Return a buffer to the pool."""
        if len(self._idle) < self._limit:
            self._idle.append(payload)


def payload_bytes(codec: Codec, layout: Layout) -> int:
    """Return the number of bytes of every payload in this codec: encoded parameters plus buffers."""
    return codec.encoded_bytes(layout) + layout.exchange_bytes - layout.parameter_bytes


def encode_payload(codec: Codec, layout: Layout, payload: torch.Tensor, free_buffers: FreeBuffers) -> torch.Tensor:
    """Encode `payload`, uint8 [>= exchange_bytes], and return uint8 [payload_bytes]: parameters, then buffers.

    The returned memory comes from `free_buffers`. The caller gives it back.
    """
    encoded_bytes = codec.encoded_bytes(layout)
    out = free_buffers.lend(payload_bytes(codec, layout))
    codec.encode(layout, payload, out[:encoded_bytes])
    out[encoded_bytes:].copy_(payload[layout.parameter_bytes : layout.exchange_bytes])
    return out


def decode_payload(codec: Codec, layout: Layout, encoded: torch.Tensor, payload: torch.Tensor) -> None:
    """Decode uint8 [payload_bytes] into `payload`, uint8 [>= exchange_bytes].

    Raises a BAD_REQUEST refusal for bytes that the codec cannot decode.
    """
    encoded_bytes = codec.encoded_bytes(layout)
    try:
        codec.decode(layout, encoded[:encoded_bytes], payload)
    except Exception as error:
        raise bad_request(f"codec '{codec.name}' cannot decode: {type(error).__name__}: {error}") from error
    payload[layout.parameter_bytes : layout.exchange_bytes].copy_(encoded[encoded_bytes:])
