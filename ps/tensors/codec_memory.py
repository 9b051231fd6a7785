"""The codecs' memory of one worker process on this side: contributions are decoded here, replies are encoded here.

It lives as long as the process is a member, so it outlasts a stream: a contribution that a resumed worker sends again
is decoded as if it came for the first time. It begins empty at a START, as the worker's does. It is used in the order
of the tensor work.
"""

from __future__ import annotations

import torch

from ...common.codecs.base import Codec, Coder, FreeBuffers, SelfContained, begin_payload, take_payload
from ...common.errors import Reason, refusal
from ...common.tensors.layout import Kind, Layout


class CodecMemory:
    """The memory of one worker process, for the part of the model that is here."""

    def __init__(self, layout: Layout, free_buffers: FreeBuffers | None = None) -> None:
        """`free_buffers` lends the memory of encoded payloads; its borrower gives it back."""
        self._layout = layout
        self.free_buffers = free_buffers or FreeBuffers()
        self._decoders: dict[str, Coder] = {}  # of the worker's present codec, if that has a memory
        self._encoder: Coder | None = None
        self._num_replies = 0  # encoded since START

    def take(self, codec: Codec, encoded: torch.Tensor, payload: torch.Tensor) -> None:
        """Decode a contribution, uint8 [payload_bytes], into `payload`, uint8 [exchange_bytes]. An attempt that is not
        committed is rolled back. Refuses BAD_REQUEST bytes that the codec cannot decode."""
        if isinstance(codec, SelfContained):  # fragments have different codecs of one name
            decoder = codec.decoder(self._layout)
        else:
            if codec.name not in self._decoders:
                self._decoders = {codec.name: codec.decoder(self._layout)}
            decoder = self._decoders[codec.name]
            decoder.rollback()
        take_payload(codec, decoder, self._layout, encoded, payload)

    def end_attempt(self, is_folded: bool) -> None:
        """The contribution that was taken last is folded, or never will be."""
        for decoder in self._decoders.values():
            decoder.commit() if is_folded else decoder.rollback()

    def encode(self, codec: Codec, payload: torch.Tensor) -> torch.Tensor:
        """Encode weights, uint8 [>= exchange_bytes], as uint8 [payload_bytes] that `free_buffers` lends. The reply
        before on the same stream counts as taken. Refuses LIMIT_EXCEEDED weights that would become infinite."""
        _check_range(codec, self._layout, payload)
        if self._encoder is None:
            self._encoder = codec.encoder(self._layout)
        self._encoder.commit()
        self._num_replies += 1
        return begin_payload(codec, self._encoder, self._layout, payload, self.free_buffers)

    def resumed(self, num_taken: int) -> None:
        """The process is back on a new stream, and has taken so many encoded replies whole. Of the last one it has all
        or nothing."""
        if self._encoder is not None:
            self._encoder.rollback() if num_taken < self._num_replies else self._encoder.commit()
        self._num_replies = num_taken


def _check_range(codec: Codec, layout: Layout, payload: torch.Tensor) -> None:
    for run in layout.runs_of(Kind.PARAMETER):
        if codec.largest < torch.finfo(run.dtype).max and run.num_elements:
            largest = max(abs(float(end)) for end in run.view(payload).aminmax())
            if largest > codec.largest:
                raise refusal(
                    Reason.LIMIT_EXCEEDED,
                    f"weights up to {largest:g}, which worker.reply_codec {codec.name} cannot hold (at most "
                    f"{codec.largest:,.0f})",
                    fix="--set worker.reply_codec=bf16, whose range is float32's",
                )
