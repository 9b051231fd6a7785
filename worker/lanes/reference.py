"""What one shard's answers bring where they are differences: this worker's copy of the server's reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...common.codecs.base import Spares, body_bytes
from ...common.codecs.shared.by_tensor import ByTensor
from ...common.codecs.shared.reference import check_sum, follow
from ...common.errors import Reason, refusal
from ...common.tensors.layout import Layout, as_bytes, new_body
from ..tensors.transfer import copy_bytes

Write = Callable[[int, memoryview], None]


class News(NamedTuple):
    """An answer leads to reference `number`; that of number `checked` has this CRC-32."""

    number: int
    checked: int = 0
    crc: int = 0


class Reference:
    """uint8 [exchange_bytes], besides the model: local steps and evaluations leave it alone. `number` is 0 while there
    is none, or it is torn."""

    def __init__(self, codec: ByTensor, layout: Layout) -> None:
        self.number = 0
        self._codec, self._layout = codec, layout
        self._body: torch.Tensor | None = None
        self._encoded = Spares()

    def take(self, num_bytes: int, codec: str, news: News, receive: Callable[[Write], None], write: Write) -> None:
        """What comes, whole or as differences in `codec`, is in the copy, and written as weights, when this returns.
        Whatever is raised, it did not come, and may come again."""
        if self._body is None:
            self._body = new_body(self._layout.exchange_bytes)
        if codec in ("", "raw"):
            self._take_whole(num_bytes, self._body, receive, write)
        else:
            if codec != self._codec.name:
                told = f"differences in codec '{codec}', asked for were '{self._codec.name}'"
                raise refusal(Reason.BAD_REQUEST, told)
            self._take_differences(num_bytes, news, self._body, receive)
            write(0, as_bytes(self._body))
        self.number = news.number

    def _take_whole(self, num_bytes: int, body: torch.Tensor, receive: Callable[[Write], None], write: Write) -> None:
        if num_bytes not in (self._layout.exchange_bytes, self._layout.total_bytes):
            raise _of_other_bytes(num_bytes, self._layout.exchange_bytes)
        self.number, memory = 0, as_bytes(body)

        def both(offset: int, data: memoryview) -> None:
            here = data[: max(0, len(memory) - offset)]  # what never changes comes behind it
            copy_bytes(memory[offset : offset + len(here)], here)
            write(offset, data)

        receive(both)

    def _take_differences(
        self, num_bytes: int, news: News, body: torch.Tensor, receive: Callable[[Write], None]
    ) -> None:
        held, one = self.number, body_bytes(self._codec, self._layout)
        if not 0 < held <= news.number:
            told = f"differences up to reference {news.number}; this worker has reference {held}"
            raise refusal(Reason.BAD_REQUEST, told)
        if num_bytes != (news.number - held) * one or num_bytes > max(one, self._layout.exchange_bytes):
            raise _of_other_bytes(num_bytes, (news.number - held) * one)
        encoded = self._encoded.lend(num_bytes)
        memory = as_bytes(encoded)

        def keep(offset: int, data: memoryview) -> None:
            copy_bytes(memory[offset : offset + len(data)], data)

        receive(keep)
        self.number = 0
        for number in range(held + 1, news.number + 1):
            at = (number - held - 1) * one
            difference = encoded[at : at + one]
            follow(self._codec, self._layout, difference.clone() if at else difference, body)  # which is aligned
            if number == news.checked:
                self._check(number, body, news.crc)
        self._encoded.give_back(encoded)

    def _check(self, number: int, body: torch.Tensor, crc: int) -> None:
        if (found := check_sum(self._layout, body)) != crc:
            raise refusal(
                Reason.BAD_REQUEST,
                f"this worker's weights of reference {number} are not the server's: their CRC-32 is {found:08x}, the "
                f"server's {crc:08x}",
                fix="start the worker again, which gets them whole; if it happens again, look at its memory, or use "
                "--set worker.answer_codec=bf16",
            )


def _of_other_bytes(found: int, expected: int) -> Exception:
    return refusal(
        Reason.BAD_REQUEST,
        f"the server sends {found} bytes of weights, of which these differences, or this model, have {expected}",
    )
