"""What the codecs of one worker process remember on this side: its contributions are decoded here, its replies encoded.

It lives as long as the process is a member, so it outlasts a stream: what a resumed worker sends again is decoded as if
it had not been sent before. A START begins with an empty one, there as here. Used in the order of the tensor work.
"""

from __future__ import annotations

import torch

from ...common.codecs.base import Codec, Coder, FreeBuffers, SelfContained, begin_payload, take_payload
from ...common.errors import Reason, refusal
from ...common.tensors.layout import Kind, Layout


class CodecMemory:
    """Of one worker process, for the part of the model that is here."""

    def __init__(self, layout: Layout, free_buffers: FreeBuffers | None = None) -> None:
        """`free_buffers` lends the memory of encoded payloads; who has one gives it back."""
        self._layout = layout
        self.free_buffers = free_buffers or FreeBuffers()
        # Of the codec that the worker has, if that remembers; one, unless it changes its mind.
        self._decoders: dict[str, Coder] = {}
        self._encoder: Coder | None = None
        self._num_replies = 0  # encoded since START

    def take(self, codec: Codec, encoded: torch.Tensor, payload: torch.Tensor) -> None:
        """A contribution, uint8 [payload_bytes], into `payload`, uint8 [exchange_bytes]; what was begun before and is
        not
        committed has never been. Raises BAD_REQUEST for what the codec cannot decode."""
        if isinstance(codec, SelfContained):  # of which each fragment has another
            take_payload(codec, codec.decoder(self._layout), self._layout, encoded, payload)
            return
        if codec.name not in self._decoders:
            self._decoders = {codec.name: codec.decoder(self._layout)}
        self._decoders[codec.name].rollback()
        take_payload(codec, self._decoders[codec.name], self._layout, encoded, payload)

    def end_attempt(self, is_folded: bool) -> None:
        """The contribution that was taken last is folded, or will never be."""
        for decoder in self._decoders.values():
            decoder.commit() if is_folded else decoder.rollback()

    def encode(self, codec: Codec, payload: torch.Tensor) -> torch.Tensor:
        """Weights, uint8 [>= exchange_bytes], as they are sent, uint8 [payload_bytes], lent by `free_buffers`. Who
        asks for them
        on the stream on which it got its reply before has taken that reply. Refuses LIMIT_EXCEEDED weights that would
        become infinite."""
        _check_range(codec, self._layout, payload)
        if self._encoder is None:
            self._encoder = codec.encoder(self._layout)
        self._encoder.commit()
        self._num_replies += 1
        return begin_payload(codec, self._encoder, self._layout, payload, self.free_buffers)

    def resumed(self, num_taken: int) -> None:
        """The process is back on a new stream, and has taken so many encoded replies whole: of the last one it has
        all or nothing."""
        if self._encoder is not None:
            if num_taken < self._num_replies:
                self._encoder.rollback()
            else:
                self._encoder.commit()
        self._num_replies = num_taken


def _check_range(codec: Codec, layout: Layout, payload: torch.Tensor) -> None:
    largest = codec.largest
    for run in layout.runs_of(Kind.PARAMETER):
        if largest < torch.finfo(run.dtype).max and run.num_elements:
            low, high = (float(end) for end in run.view(payload).aminmax())
            if max(-low, high) > largest:
                raise refusal(
                    Reason.LIMIT_EXCEEDED,
                    f"weights up to {max(-low, high):g}, which worker.reply_codec {codec.name} cannot hold (at most "
                    f"{largest:,.0f})",
                    fix="--set worker.reply_codec=bf16, whose range is float32's",
                )
