"""Receives weights from one shard: raw ones piece by piece, encoded ones when they are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...common.codecs.base import Codec, FreeBuffers, decode_payload, payload_bytes
from ...common.codecs.shared.by_tensor import ByTensor, only_rest
from ...common.codecs.shared.reference import check_sum, follow, moves_reference
from ...common.errors import bad_request
from ...common.tensors.layout import as_bytes, new_payload
from ...common.wire.records import ReferenceInfo, WeightsInfo
from ..tensors.transfer import DirectTransfer, ModelTensors, copy_bytes

Write = Callable[[int, memoryview], None]
# `receive(write)` passes each piece of the announced payload to `write`, and returns after the last one.
Receive = Callable[[Write], None]


class Down:
    """Receives one shard's part of the weights.

    Replies may be differences to the server's reference. This worker's copy of it is separate from the model, so local
    steps and evaluations do not change it. `reference` is the number of the copy; 0: it is not complete.
    """

    def __init__(self, codec: Codec, model: ModelTensors, transfer: DirectTransfer) -> None:
        self.codec, self.transfer = codec, transfer
        self._layout, self._names_at = model.layout, model.names_at
        self._moves_reference = moves_reference(codec)
        self.reference = 0
        self._copy: torch.Tensor | None = None  # uint8 [exchange_bytes]
        self._encoded, self._payloads = FreeBuffers(), FreeBuffers()

    def take(self, weights: WeightsInfo, receive: Receive, kept: Sequence[tuple[int, int]] = ()) -> None:
        """Receive weights. On return the model has them, and the server may rely on that.

        After an error the weights count as not received, and may be sent again. Bytes in `kept`, which `receive` fills,
        are not sent because the model has them. With a reference the payload is a reference or leads to one.
        """
        num_bytes, codec, exchange_bytes = weights.num_bytes, weights.codec, self._layout.exchange_bytes
        is_raw, info = codec in ("", "raw"), weights.reference if self._moves_reference else None
        if is_raw:
            if num_bytes not in (exchange_bytes, self._layout.total_bytes) and (num_bytes or info is not None):
                raise _other_bytes(num_bytes, exchange_bytes)
            if info is not None:
                self._take_whole(info, receive)
            else:
                receive(self.transfer.write)
        elif info is None and self._moves_reference:
            message = f"weights in codec '{codec}', which takes differences only, and no reference"
            raise bad_request(message, fix="install the same version of paramserver on both")
        elif codec != self.codec.name:
            found = "weights" if info is None else "differences"
            raise bad_request(f"{found} in codec '{codec}', asked for were '{self.codec.name}'")
        elif info is not None:
            self._take_differences(num_bytes, info, receive)
        else:
            if num_bytes != (expected := payload_bytes(self.codec, self._layout)):
                raise _other_bytes(num_bytes, expected)
            encoded, payload = self._encoded.lend(num_bytes), self._payloads.lend(exchange_bytes)
            receive(_writer(encoded))
            decode_payload(self.codec, self._layout, encoded, payload)
            self.transfer.write(0, as_bytes(payload))
            self._encoded.give_back(encoded)
            self._payloads.give_back(payload)
        if num_bytes or info is not None:
            self.transfer.finish_write(num_bytes if is_raw else exchange_bytes, kept)

    def _take_whole(self, info: ReferenceInfo, receive: Receive) -> None:
        """Receive a complete reference into the copy and the model. After an error it counts as not received."""
        if self._copy is None:
            self._copy = new_payload(self._layout.exchange_bytes)
        self.reference, memory = 0, as_bytes(self._copy)

        def both(offset: int, data: memoryview) -> None:
            mapped = data[: max(0, len(memory) - offset)]  # frozen tensors follow the exchanged ones
            copy_bytes(memory[offset : offset + len(mapped)], mapped)
            self.transfer.write(offset, data)

        receive(both)
        self.reference = info.number

    def _take_differences(self, num_bytes: int, info: ReferenceInfo, receive: Receive) -> None:
        """Receive differences that lead from the copy to a newer reference, and write it into the model."""
        first, payload = self.reference, self._copy
        if payload is None or not 0 < first <= info.number:
            message = f"differences up to reference {info.number}; this worker has reference {first}"
            raise bad_request(message)
        codecs = self._codecs(info, info.number - first)
        sizes = [payload_bytes(codec, self._layout) for codec in codecs]
        if num_bytes != sum(sizes) or num_bytes > max(*sizes, 0, self._layout.exchange_bytes):
            raise _other_bytes(num_bytes, sum(sizes))
        encoded = self._encoded.lend(num_bytes)
        receive(_writer(encoded))
        self.reference = at = 0
        for number, codec, size in zip(range(first + 1, info.number + 1), codecs, sizes, strict=True):
            difference = encoded[at : at + size]
            follow(codec, self._layout, difference.clone() if at else difference, payload)  # the clone is aligned
            at += size
            if number == info.checked and (found := check_sum(self._layout, payload)) != info.crc:
                crcs = f"their CRC-32 is {found:08x}, the server's {info.crc:08x}"
                message = f"this worker's weights of reference {number} are not the server's: {crcs}"
                fix = "start the worker again, which receives them whole; if it happens again, check its memory, or "
                raise bad_request(message, fix=f"{fix}use --set worker.reply_codec=bf16")
        self._encoded.give_back(encoded)
        self.transfer.write(0, as_bytes(payload))
        self.reference = info.number

    def _codecs(self, info: ReferenceInfo, count: int) -> list[ByTensor]:
        """The codec of each difference, for its tensors. Refuses a wrong count and unknown tensors."""
        assert isinstance(self.codec, ByTensor)
        if not info.left_out:
            return [self.codec] * count
        if len(info.left_out) != count:
            raise bad_request(f"{count} differences, but missing tensors are listed for {len(info.left_out)}")
        try:
            return [only_rest(self.codec, self._names_at(positions)) for positions in info.left_out]
        except IndexError:
            raise bad_request("differences without tensors that the model does not have") from None


def _writer(payload: torch.Tensor) -> Write:
    """A function that copies pieces to a buffer, uint8 [n]."""
    memory = as_bytes(payload)
    return lambda offset, data: copy_bytes(memory[offset : offset + len(data)], data)


def _other_bytes(found: int, expected: int) -> Exception:
    message = f"the server sends {found} bytes of weights; this model, or these differences, have {expected}"
    return bad_request(message)
