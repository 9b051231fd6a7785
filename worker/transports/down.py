"""Weights on their way from one shard into the model: raw ones piece by piece, encoded ones when they are whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...common.codecs.base import Codec, Coder, FreeBuffers, payload_bytes, take_payload
from ...common.codecs.shared.by_tensor import ByTensor
from ...common.codecs.shared.reference import moves_reference
from ...common.errors import Reason, refusal
from ...common.tensors.layout import as_bytes
from ...common.wire.records import ReferenceInfo
from ..tensors.staged import Transfer
from ..tensors.transfer import ModelTensors, copy_bytes
from .reference import Reference

# Takes the payload that was announced: `receive(write)` hands over each piece that comes, and returns after the last
# one.
Receive = Callable[[Callable[[int, memoryview], None]], None]


class Down:
    """One shard's part of the weights. `num_taken` replies in `codec`, whose memory is here, came since a START."""

    def __init__(self, codec: Codec, model: ModelTensors, transfer: Transfer) -> None:
        self.codec = codec
        self._layout = model.layout
        self.transfer = transfer
        self._decoder: Coder = codec.decoder(model.layout)
        self.num_taken = 0
        self._reference: Reference | None = None  # where replies are differences
        if isinstance(codec, ByTensor) and moves_reference(codec):
            self._reference = Reference(codec, model.layout, model.names_at)
        self._encoded, self._payloads = FreeBuffers(), FreeBuffers()

    def started(self) -> None:
        """The server has forgotten what it sent before."""
        self._decoder, self.num_taken = self.codec.decoder(self._layout), 0
        if self._reference is not None:
            self._reference.number = 0

    @property
    def reference(self) -> int:
        """The number of the one that is here whole; 0: none."""
        return self._reference.number if self._reference is not None else 0

    def take(
        self,
        num_bytes: int,
        codec: str,
        receive: Receive,
        kept: Sequence[tuple[int, int]] = (),
        reference: ReferenceInfo | None = None,
    ) -> None:
        """The model has the weights when this returns, and the server may count on it. Whatever is raised, they did not
        come, and may come again. Bytes `kept`, which `receive` finds, do not come: the model has them. With
        `reference` the payload leads to one."""
        if reference is not None and self._reference is not None:
            self._reference.take(num_bytes, codec, reference, receive, self.transfer.write)
            num_bytes = num_bytes if codec in ("", "raw") else self._layout.exchange_bytes
        elif codec in ("", "raw"):
            self._check(num_bytes, (0, self._layout.exchange_bytes, self._layout.total_bytes))
            receive(self.transfer.write)
        else:
            self._take_encoded(num_bytes, codec, receive)
            num_bytes = self._layout.exchange_bytes
        if num_bytes:
            self.transfer.finish_write(num_bytes, kept)

    def _take_encoded(self, num_bytes: int, codec: str, receive: Receive) -> None:
        if self._reference is not None:
            message = f"weights in codec '{codec}', which takes differences only, and no reference"
            raise refusal(Reason.BAD_REQUEST, message, fix="install the same version of paramserver on both")
        if codec != self.codec.name:
            raise refusal(Reason.BAD_REQUEST, f"weights in codec '{codec}', asked for were '{self.codec.name}'")
        self._check(num_bytes, (payload_bytes(self.codec, self._layout),))
        encoded, payload = self._encoded.lend(num_bytes), self._payloads.lend(self._layout.exchange_bytes)
        memory = as_bytes(encoded)

        def write(offset: int, data: memoryview) -> None:
            copy_bytes(memory[offset : offset + len(data)], data)

        receive(write)
        take_payload(self.codec, self._decoder, self._layout, encoded, payload)
        self.transfer.write(0, as_bytes(payload))
        self._decoder.commit()
        self._encoded.give_back(encoded)
        self._payloads.give_back(payload)
        self.num_taken += 1

    def _check(self, num_bytes: int, possible: tuple[int, ...]) -> None:
        if num_bytes not in possible:
            raise refusal(Reason.BAD_REQUEST, f"the server sends {num_bytes} bytes, this model has {possible[-1]}")
