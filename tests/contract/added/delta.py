"""A codec with memory on both sides, for tests: the difference from what the other side has, in sixteenths.

What rounding leaves out comes with the next difference (error feedback). A payload says how many were counted before
it, so a decoder that counts one twice, or not at all, fails at once, and what it holds differs from then on.
"""

from __future__ import annotations

import torch

from paramserver.common.codecs.base import Codec, Coder
from paramserver.common.tensors.layout import Kind, Layout

_COUNT_BYTES = 8


class Memory:
    """What both sides hold: the values that came so far, float32 [elements], and how many payloads counted."""

    def __init__(self, layout: Layout) -> None:
        self.runs = layout.runs_of(Kind.PARAMETER)
        self.values = [torch.zeros(run.num_elements) for run in self.runs]
        self.num_counted = 0
        self._next: list[torch.Tensor] | None = None

    def attempt(self, values: list[torch.Tensor]) -> None:
        self._next = values

    def commit(self) -> None:
        if self._next is not None:
            self.values, self.num_counted, self._next = self._next, self.num_counted + 1, None

    def rollback(self) -> None:
        self._next = None


class DeltaEncoder(Memory):
    def begin(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        out[:_COUNT_BYTES].view(torch.int64).fill_(self.num_counted)
        at, values = _COUNT_BYTES, []
        for run, remembered in zip(self.runs, self.values, strict=True):
            steps = ((run.view(payload).float() - remembered) * 16).round().clamp(-127, 127)
            out[at : at + run.num_elements].view(torch.int8).copy_(steps)
            values.append(remembered + steps / 16)
            at += run.num_elements
        self.attempt(values)


class DeltaDecoder(Memory):
    def begin(self, encoded: torch.Tensor, payload: torch.Tensor) -> None:
        count = int(encoded[:_COUNT_BYTES].view(torch.int64))
        if count != self.num_counted:
            raise ValueError(f"{count} payloads were counted there, {self.num_counted} here")
        at, values = _COUNT_BYTES, []
        for run, remembered in zip(self.runs, self.values, strict=True):
            steps = encoded[at : at + run.num_elements].view(torch.int8).float()
            values.append(remembered + steps / 16)
            run.view(payload).copy_(values[-1])
            at += run.num_elements
        self.attempt(values)


class DeltaCodec(Codec):
    name = "delta"
    is_identity = False

    def encoded_bytes(self, layout: Layout) -> int:
        return _COUNT_BYTES + sum(run.num_elements for run in layout.runs_of(Kind.PARAMETER))

    def encoder(self, layout: Layout) -> Coder:
        return DeltaEncoder(layout)

    def decoder(self, layout: Layout) -> Coder:
        return DeltaDecoder(layout)


ENTRY = DeltaCodec
