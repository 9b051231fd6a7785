"""The server's codec memory for one worker process, which decodes its contributions and encodes its replies.

The memory lives as long as the process is a member, so it outlasts a stream. A contribution that a resumed worker sends
again is decoded as at its first arrival. Both sides begin with an empty memory at START. All methods run in the order
of the tensor work.
"""

from __future__ import annotations

import torch

from ...common.codecs.base import Codec, Coder, FreeBuffers, SelfContained, begin_payload, take_payload
from ...common.errors import Reason, refusal
from ...common.tensors.layout import Kind, Layout


class CodecMemory:
    """The memory of one worker process, for this shard's part of the model."""

    def __init__(self, layout: Layout, free_buffers: FreeBuffers | None = None) -> None:
        """`free_buffers`: the pool for encoded payloads. The caller of `encode` gives them back."""
        self._layout = layout
        self.free_buffers = free_buffers or FreeBuffers()
        self._decoders: dict[str, Coder] = {}  # at most one: of the worker's present codec, if it has memory
        self._encoder: Coder | None = None
        self._num_replies = 0  # replies encoded since START

    def take(self, codec: Codec, encoded: torch.Tensor, payload: torch.Tensor) -> None:
        """Decode a contribution, uint8 [payload_bytes], into `payload`, uint8 [exchange_bytes].

        An earlier attempt that was not committed is rolled back. Raises a BAD_REQUEST refusal for bytes that the codec
        cannot decode.
        """
        if isinstance(codec, SelfContained):  # fragments have different codecs of one name
            decoder = codec.decoder(self._layout)
        else:
            if codec.name not in self._decoders:
                self._decoders = {codec.name: codec.decoder(self._layout)}
            decoder = self._decoders[codec.name]
            decoder.rollback()
        take_payload(codec, decoder, self._layout, encoded, payload)

    def end_attempt(self, is_folded: bool) -> None:
        """Commit the decoding of the last contribution if it is folded, or roll it back."""
        for decoder in self._decoders.values():
            decoder.commit() if is_folded else decoder.rollback()

    def encode(self, codec: Codec, payload: torch.Tensor) -> torch.Tensor:
        """Encode weights, uint8 [>= exchange_bytes], into a buffer of `free_buffers`, uint8 [payload_bytes].

        The previous reply on the same stream counts as received. Raises a LIMIT_EXCEEDED refusal for weights that would
        become infinite.
        """
        _check_range(codec, self._layout, payload)
        if self._encoder is None:
            self._encoder = codec.encoder(self._layout)
        self._encoder.commit()
        self._num_replies += 1
        return begin_payload(codec, self._encoder, self._layout, payload, self.free_buffers)

    def resumed(self, num_taken: int) -> None:
        """Continue after a process has resumed on a new stream, with `num_taken` encoded replies received."""
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
                    f"weights up to {largest:g}, which worker.reply_codec {codec.name} cannot encode (at most "
                    f"{codec.largest:,.0f})",
                    fix="--set worker.reply_codec=bf16, whose range is float32's",
                )
