"""Receives weights from one shard: raw ones piece by piece, encoded ones when they are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from ...common.codecs.base import Codec, FreeBuffers, decode_payload, payload_bytes
from ...common.codecs.shared.by_tensor import ByTensor, only_rest
from ...common.codecs.shared.reference import check_sum, follow, moves_reference
from ...common.errors import bad_request
from ...common.tensors.layout import Layout, as_bytes, new_payload
from ...common.wire.records import ReferenceInfo, WeightsInfo
from ..tensors.transfer import DirectTransfer, ModelTensors, copy_bytes

Write = Callable[[int, memoryview], None]
# `receive(write)` passes each piece of the announced payload to `write`, and returns after the last one.
Receive = Callable[[Write], None]


class Down:
    """Receives one shard's part of the weights."""

    def __init__(self, codec: Codec, model: ModelTensors, transfer: DirectTransfer) -> None:
        self.codec = codec
        self._layout = model.layout
        self.transfer = transfer
        self._reference: Reference | None = None  # set if replies are differences to a reference
        if isinstance(codec, ByTensor) and moves_reference(codec):
            self._reference = Reference(codec, model.layout, model.names_at)
        self._encoded, self._payloads = FreeBuffers(), FreeBuffers()

    def started(self) -> None:
        """A START arrived: the server has lost its memory of earlier replies."""
        if self._reference is not None:
            self._reference.number = 0

    @property
    def reference(self) -> int:
        """The number of the complete reference on this worker; 0: none."""
        return self._reference.number if self._reference is not None else 0

    def take(self, weights: WeightsInfo, receive: Receive, kept: Sequence[tuple[int, int]] = ()) -> None:
        """Receive weights. On return the model has them, and the server may rely on that.

        After an error the weights count as not received, and may be sent again. Bytes in `kept`, which `receive` fills,
        are not sent because the model has them. With a reference the payload is a reference or leads to one.
        """
        num_bytes, codec = weights.num_bytes, weights.codec
        if weights.reference is not None and self._reference is not None:
            self._reference.take(num_bytes, codec, weights.reference, receive, self.transfer.write)
            num_bytes = num_bytes if codec in ("", "raw") else self._layout.exchange_bytes
        elif codec in ("", "raw"):
            if num_bytes not in (0, self._layout.exchange_bytes, self._layout.total_bytes):
                raise _other_bytes(num_bytes, self._layout.exchange_bytes)
            receive(self.transfer.write)
        else:
            if self._reference is not None:
                message = f"weights in codec '{codec}', which takes differences only, and no reference"
                raise bad_request(message, fix="install the same version of paramserver on both")
            if codec != self.codec.name:
                raise bad_request(f"weights in codec '{codec}', asked for were '{self.codec.name}'")
            if num_bytes != (expected := payload_bytes(self.codec, self._layout)):
                raise _other_bytes(num_bytes, expected)
            encoded, payload = self._encoded.lend(num_bytes), self._payloads.lend(self._layout.exchange_bytes)
            receive(_writer(encoded))
            decode_payload(self.codec, self._layout, encoded, payload)
            self.transfer.write(0, as_bytes(payload))
            self._encoded.give_back(encoded)
            self._payloads.give_back(payload)
            num_bytes = self._layout.exchange_bytes
        if num_bytes:
            self.transfer.finish_write(num_bytes, kept)


class Reference:
    """This worker's copy of the server's reference, uint8 [exchange_bytes]. Replies are differences to it.

    It is separate from the model, so local steps and evaluations do not change it. `number` is 0 if there is no
    complete reference.
    """

    def __init__(self, codec: ByTensor, layout: Layout, names_at: Callable[[Iterable[int]], frozenset[str]]) -> None:
        """`names_at`: returns names of this worker's tensors, by position in the specs of the whole model."""
        self.number = 0
        self._names_at = names_at
        self._codec, self._layout = codec, layout
        self._payload: torch.Tensor | None = None
        self._encoded = FreeBuffers()

    def take(self, num_bytes: int, codec: str, info: ReferenceInfo, receive: Receive, write: Write) -> None:
        """Receive a reference into the copy, complete or as differences in `codec`, and write it as weights.

        After an error it counts as not received, and may be sent again.
        """
        if self._payload is None:
            self._payload = new_payload(self._layout.exchange_bytes)
        if codec in ("", "raw"):
            self._take_whole(num_bytes, self._payload, receive, write)
        else:
            if codec != self._codec.name:
                raise bad_request(f"differences in codec '{codec}', asked for were '{self._codec.name}'")
            self._take_differences(num_bytes, info, self._payload, receive)
            write(0, as_bytes(self._payload))
        self.number = info.number

    def _take_whole(self, num_bytes: int, payload: torch.Tensor, receive: Receive, write: Write) -> None:
        if num_bytes not in (self._layout.exchange_bytes, self._layout.total_bytes):
            raise _other_bytes(num_bytes, self._layout.exchange_bytes)
        self.number, memory = 0, as_bytes(payload)

        def both(offset: int, data: memoryview) -> None:
            mapped = data[: max(0, len(memory) - offset)]  # frozen tensors follow the exchanged ones
            copy_bytes(memory[offset : offset + len(mapped)], mapped)
            write(offset, data)

        receive(both)

    def _take_differences(self, num_bytes: int, info: ReferenceInfo, payload: torch.Tensor, receive: Receive) -> None:
        first = self.number
        if not 0 < first <= info.number:
            raise bad_request(f"differences up to reference {info.number}; this worker has reference {first}")
        codecs = self._codecs(info, info.number - first)
        sizes = [payload_bytes(codec, self._layout) for codec in codecs]
        if num_bytes != sum(sizes) or num_bytes > max(*sizes, 0, self._layout.exchange_bytes):
            raise _other_bytes(num_bytes, sum(sizes))
        encoded = self._encoded.lend(num_bytes)
        receive(_writer(encoded))
        self.number = at = 0
        for number, codec, size in zip(range(first + 1, info.number + 1), codecs, sizes, strict=True):
            difference = encoded[at : at + size]
            follow(codec, self._layout, difference.clone() if at else difference, payload)  # the clone is aligned
            at += size
            if number == info.checked:
                self._check(number, payload, info.crc)
        self._encoded.give_back(encoded)

    def _codecs(self, info: ReferenceInfo, count: int) -> list[ByTensor]:
        """The codec of each difference, for its tensors. Refuses a wrong count and unknown tensors."""
        if not info.left_out:
            return [self._codec] * count
        if len(info.left_out) != count:
            raise bad_request(f"{count} differences, but missing tensors are listed for {len(info.left_out)}")
        try:
            return [only_rest(self._codec, self._names_at(positions)) for positions in info.left_out]
        except IndexError:
            raise bad_request("differences without tensors that the model does not have") from None

    def _check(self, number: int, payload: torch.Tensor, crc: int) -> None:
        if (found := check_sum(self._layout, payload)) != crc:
            raise bad_request(
                f"this worker's weights of reference {number} are not the server's: their CRC-32 is {found:08x}, the "
                f"server's {crc:08x}",
                fix="start the worker again, which receives them whole; if it happens again, check its memory, or use "
                "--set worker.reply_codec=bf16",
            )


def _writer(payload: torch.Tensor) -> Write:
    """A function that copies pieces to a buffer, uint8 [n]."""
    memory = as_bytes(payload)
    return lambda offset, data: copy_bytes(memory[offset : offset + len(data)], data)


def _other_bytes(found: int, expected: int) -> Exception:
    message = f"the server sends {found} bytes of weights; this model, or these differences, have {expected}"
    return bad_request(message)
