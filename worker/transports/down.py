"""Weights on their way from one shard into the model: raw ones piece by piece, encoded ones when they are whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from ...common.codecs.base import Codec, Coder, FreeBuffers, payload_bytes, take_payload
from ...common.codecs.shared.by_tensor import ByTensor, only_rest
from ...common.codecs.shared.reference import check_sum, follow, moves_reference
from ...common.errors import Reason, refusal
from ...common.tensors.layout import Layout, as_bytes, new_payload
from ...common.wire.records import ReferenceInfo
from ..tensors.staged import Transfer
from ..tensors.transfer import ModelTensors, copy_bytes

Write = Callable[[int, memoryview], None]
# `receive(write)` passes each piece of the announced payload to `write`, and returns after the last one.
Receive = Callable[[Write], None]


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
        """The number of the reference that is here whole; 0: none."""
        return self._reference.number if self._reference is not None else 0

    def take(
        self,
        num_bytes: int,
        codec: str,
        receive: Receive,
        kept: Sequence[tuple[int, int]] = (),
        reference: ReferenceInfo | None = None,
    ) -> None:
        """Receive weights; the model has them when this returns, and the server may count on it. After an error they
        did not come, and may come again. Bytes `kept`, which `receive` finds, do not come: the model has them. With
        `reference` the payload leads to one."""
        if reference is not None and self._reference is not None:
            self._reference.take(num_bytes, codec, reference, receive, self.transfer.write)
            num_bytes = num_bytes if codec in ("", "raw") else self._layout.exchange_bytes
        elif codec in ("", "raw"):
            if num_bytes not in (0, self._layout.exchange_bytes, self._layout.total_bytes):
                raise _other_bytes(num_bytes, self._layout.exchange_bytes)
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
        if num_bytes != (expected := payload_bytes(self.codec, self._layout)):
            raise _other_bytes(num_bytes, expected)
        encoded, payload = self._encoded.lend(num_bytes), self._payloads.lend(self._layout.exchange_bytes)
        receive(_writer(encoded))
        take_payload(self.codec, self._decoder, self._layout, encoded, payload)
        self.transfer.write(0, as_bytes(payload))
        self._decoder.commit()
        self._encoded.give_back(encoded)
        self._payloads.give_back(payload)
        self.num_taken += 1


class Reference:
    """This worker's copy of the server's reference, to which replies are differences: uint8 [exchange_bytes], besides
    the model, so that local steps and evaluations do not change it. `number` is 0 while there is no whole one."""

    def __init__(
        self, codec: ByTensor, layout: Layout, names_at: Callable[[Iterable[int]], frozenset[str]] | None = None
    ) -> None:
        """`names_at`: names of the tensors that are here, by position in the specs of the whole model."""
        self.number = 0
        self._names_at = names_at
        self._codec, self._layout = codec, layout
        self._payload: torch.Tensor | None = None
        self._encoded = FreeBuffers()

    def take(self, num_bytes: int, codec: str, info: ReferenceInfo, receive: Receive, write: Write) -> None:
        """Receive a reference, whole or as differences in `codec`, into the copy, and write it as weights. After an
        error it did not come, and may come again."""
        if self._payload is None:
            self._payload = new_payload(self._layout.exchange_bytes)
        if codec in ("", "raw"):
            self._take_whole(num_bytes, self._payload, receive, write)
        else:
            if codec != self._codec.name:
                message = f"differences in codec '{codec}', asked for were '{self._codec.name}'"
                raise refusal(Reason.BAD_REQUEST, message)
            self._take_differences(num_bytes, info, self._payload, receive)
            write(0, as_bytes(self._payload))
        self.number = info.number

    def _take_whole(self, num_bytes: int, payload: torch.Tensor, receive: Receive, write: Write) -> None:
        if num_bytes not in (self._layout.exchange_bytes, self._layout.total_bytes):
            raise _other_bytes(num_bytes, self._layout.exchange_bytes)
        self.number, memory = 0, as_bytes(payload)

        def both(offset: int, data: memoryview) -> None:
            mapped = data[: max(0, len(memory) - offset)]  # frozen tensors come behind it
            copy_bytes(memory[offset : offset + len(mapped)], mapped)
            write(offset, data)

        receive(both)

    def _take_differences(self, num_bytes: int, info: ReferenceInfo, payload: torch.Tensor, receive: Receive) -> None:
        first = self.number
        if not 0 < first <= info.number:
            message = f"differences up to reference {info.number}; this worker has reference {first}"
            raise refusal(Reason.BAD_REQUEST, message)
        codecs = self._codecs(info, info.number - first)
        sizes = [payload_bytes(codec, self._layout) for codec in codecs]
        if num_bytes != sum(sizes) or num_bytes > max(*sizes, 0, self._layout.exchange_bytes):
            raise _other_bytes(num_bytes, sum(sizes))
        encoded = self._encoded.lend(num_bytes)
        receive(_writer(encoded))
        self.number = at = 0
        for number, codec, size in zip(range(first + 1, info.number + 1), codecs, sizes, strict=True):
            difference = encoded[at : at + size]
            follow(codec, self._layout, difference.clone() if at else difference, payload)  # a clone is aligned
            at += size
            if number == info.checked:
                self._check(number, payload, info.crc)
        self._encoded.give_back(encoded)

    def _codecs(self, info: ReferenceInfo, count: int) -> list[ByTensor]:
        """The codec of each difference, for the tensors that it has. Refuses another count, and unknown tensors."""
        if not info.left_out:
            return [self._codec] * count
        if len(info.left_out) != count or self._names_at is None:
            raise refusal(Reason.BAD_REQUEST, f"{count} differences, and what is not in {len(info.left_out)} of them")
        try:
            return [only_rest(self._codec, self._names_at(positions)) for positions in info.left_out]
        except IndexError:
            raise refusal(Reason.BAD_REQUEST, "differences without tensors that the model does not have") from None

    def _check(self, number: int, payload: torch.Tensor, crc: int) -> None:
        if (found := check_sum(self._layout, payload)) != crc:
            raise refusal(
                Reason.BAD_REQUEST,
                f"this worker's weights of reference {number} are not the server's: their CRC-32 is {found:08x}, the "
                f"server's {crc:08x}",
                fix="start the worker again, which gets them whole; if it happens again, look at its memory, or use "
                "--set worker.reply_codec=bf16",
            )


def _writer(payload: torch.Tensor) -> Write:
    """Copies pieces to a buffer, uint8 [n]."""
    memory = as_bytes(payload)
    return lambda offset, data: copy_bytes(memory[offset : offset + len(data)], data)


def _other_bytes(found: int, expected: int) -> Exception:
    message = f"the server sends {found} bytes of weights; this model, or these differences, have {expected}"
    return refusal(Reason.BAD_REQUEST, message)
