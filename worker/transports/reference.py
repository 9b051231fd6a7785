"""What one shard's replies bring where they are differences: this worker's copy of the server's reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ...common.codecs.base import FreeBuffers, payload_bytes
from ...common.codecs.shared.by_tensor import ByTensor, only_rest
from ...common.codecs.shared.reference import check_sum, follow
from ...common.errors import Reason, refusal
from ...common.tensors.layout import Layout, as_bytes, new_payload
from ...common.wire.records import ReferenceInfo
from ..tensors.transfer import copy_bytes

Write = Callable[[int, memoryview], None]


class Reference:
    """uint8 [exchange_bytes], besides the model: local steps and evaluations leave it alone. `number` is 0 while there
    is none, or it is torn."""

    def __init__(
        self, codec: ByTensor, layout: Layout, names_at: Callable[[Iterable[int]], frozenset[str]] | None = None
    ) -> None:
        """`names_at`: of tensors of the whole model by position in its specs, those that are here."""
        self.number = 0
        self._names_at = names_at
        self._codec, self._layout = codec, layout
        self._payload: torch.Tensor | None = None
        self._encoded = FreeBuffers()

    def take(
        self,
        num_bytes: int,
        codec: str,
        info: ReferenceInfo,
        receive: Callable[[Write], None],
        write: Write,
    ) -> None:
        """What comes, whole or as differences in `codec`, is in the copy, and written as weights, when this returns.
        Whatever is raised, it did not come, and may come again."""
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

    def _take_whole(
        self, num_bytes: int, payload: torch.Tensor, receive: Callable[[Write], None], write: Write
    ) -> None:
        if num_bytes not in (self._layout.exchange_bytes, self._layout.total_bytes):
            raise _of_other_bytes(num_bytes, self._layout.exchange_bytes)
        self.number, memory = 0, as_bytes(payload)

        def both(offset: int, data: memoryview) -> None:
            here = data[: max(0, len(memory) - offset)]  # what never changes comes behind it
            copy_bytes(memory[offset : offset + len(here)], here)
            write(offset, data)

        receive(both)

    def _take_differences(
        self,
        num_bytes: int,
        info: ReferenceInfo,
        payload: torch.Tensor,
        receive: Callable[[Write], None],
    ) -> None:
        held = self.number
        if not 0 < held <= info.number:
            message = f"differences up to reference {info.number}; this worker has reference {held}"
            raise refusal(Reason.BAD_REQUEST, message)
        codecs = self._codecs(info, info.number - held)
        sizes = [payload_bytes(codec, self._layout) for codec in codecs]
        if num_bytes != sum(sizes) or num_bytes > max(*sizes, 0, self._layout.exchange_bytes):
            raise _of_other_bytes(num_bytes, sum(sizes))
        encoded = self._encoded.lend(num_bytes)
        memory = as_bytes(encoded)

        def keep(offset: int, data: memoryview) -> None:
            copy_bytes(memory[offset : offset + len(data)], data)

        receive(keep)
        self.number = at = 0
        for number, codec, size in zip(range(held + 1, info.number + 1), codecs, sizes, strict=True):
            difference = encoded[at : at + size]
            follow(codec, self._layout, difference.clone() if at else difference, payload)  # which is aligned
            at += size
            if number == info.checked:
                self._check(number, payload, info.crc)
        self._encoded.give_back(encoded)

    def _codecs(self, info: ReferenceInfo, count: int) -> list[ByTensor]:
        """Of each difference, for what it has. Refuses BAD_REQUEST what is not of so many, or of no such tensors."""
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


def _of_other_bytes(found: int, expected: int) -> Exception:
    return refusal(
        Reason.BAD_REQUEST,
        f"the server sends {found} bytes of weights, of which these differences, or this model, have {expected}",
    )
