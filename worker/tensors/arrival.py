"""Weights on their way into a model, of which each tensor may be used as soon as it is whole."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator, Sequence

from .staged import Transfer
from .transfer import ModelTensors

_LOOK_UP_S = 0.2
# What is received at once, so that a tensor in the middle of a large piece need not wait for all of it.
_STRIDE_BYTES = 256 << 10


class Arrival:
    """Of one version, over all shards: the threads that receive it write to its parts, another one waits for tensors,
    which are named by their index in the whole model."""

    def __init__(self, num_tensors: int) -> None:
        self._left = [0] * num_tensors  # bytes that have not come
        self._places: list[list[tuple[Transfer, int]]] = [[] for _ in range(num_tensors)]
        self._changed = threading.Condition()
        self._is_over = False

    def part(self, transfer: Transfer, model: ModelTensors) -> ArrivingPart:
        """What one shard's weights are written to."""
        wholes = [model.whole_index(index) for index in range(model.num_exchanged)]
        for index, whole in enumerate(wholes):
            self._left[whole] += model.layout.entries[index].num_bytes
            self._places[whole].append((transfer, index))
        return ArrivingPart(self, transfer, model, wholes)

    @property
    def awaited(self) -> list[int]:
        """Tensors of which something has not come."""
        return [index for index, left in enumerate(self._left) if left]

    def came(self, index: int, num_bytes: int) -> None:
        with self._changed:
            self._left[index] -= num_bytes
            if not self._left[index]:
                self._changed.notify_all()

    def has_come(self, index: int) -> bool:
        return not self._left[index]

    def end(self) -> None:
        """Nothing more comes."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait(self, index: int) -> bool:
        """Until the tensor is whole; False when it never will be. A signal may raise here."""
        with self._changed:
            while self._left[index] and not self._is_over:
                self._changed.wait(_LOOK_UP_S)
            return not self._left[index]

    def take(self, index: int) -> None:
        """A tensor that is whole is in the model when this returns, or when its stream's next kernel runs."""
        for transfer, place in self._places[index]:
            transfer.finish_tensor(place)


class ArrivingPart:
    """As the shard's Transfer, and notes what has come."""

    def __init__(self, arrival: Arrival, transfer: Transfer, model: ModelTensors, wholes: list[int]) -> None:
        self._arrival, self._transfer, self._wholes = arrival, transfer, wholes
        self._entries = model.layout.entries[: len(wholes)]
        self._ends = [entry.end for entry in self._entries]

    def write(self, offset: int, data: memoryview) -> None:
        self._transfer.write(offset, data)
        self._came(offset, offset + len(data))

    def targets(self, offset: int, num_bytes: int) -> Iterator[memoryview]:
        end = offset + num_bytes
        for start in range(offset, end, _STRIDE_BYTES):
            at = start
            for target in self._transfer.targets(start, min(_STRIDE_BYTES, end - start)):
                yield target
                self._came(at, at + len(target))
                at += len(target)

    def finish_write(self, num_bytes: int, kept: Sequence[tuple[int, int]] = ()) -> None:
        """Each tensor is finished when it is taken. Nothing is kept: models in parts do not wait so."""

    def _came(self, start: int, end: int) -> None:
        index = bisect.bisect_right(self._ends, start)
        while index < len(self._entries) and self._entries[index].offset < end:
            entry = self._entries[index]
            if here := min(end, entry.end) - max(start, entry.offset):
                self._arrival.came(self._wholes[index], here)
            index += 1
