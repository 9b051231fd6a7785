"""A contribution on its way: the memory it comes into, what of it has come, whether it is sound so far.

Pieces may come in any order and before the facts that belong to them. A part that is whole is looked through and
measured at once (`sanity.py`), while it is in the cache and the rest is still arriving.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial

import torch

from ...common.codecs.base import Codec, SelfContained, payload_bytes
from ...common.errors import ParamServerError
from ...common.tensors.layout import as_bytes
from ...common.wire.frames import Frame, PayloadReader
from ..core.judgement import Judgement
from .codec_memory import CodecMemory
from .sanity import Findings
from .store import Store
from .thread import TensorThread
from .windows import WINDOW_BYTES

# Looked through at once; less, and handing the work over costs more than the work.
_WINDOWS_AT_ONCE = 2
_PART_BYTES = _WINDOWS_AT_ONCE * WINDOW_BYTES


class Upload:
    """One payload of a contribution, encoded with `codec`, into `payload`, uint8 [layout.exchange_bytes].

    With `in_segment` the payload is memory shared with the worker, who writes there himself. `memory` is what the
    worker's
    codec remembers.
    """

    def __init__(
        self,
        store: Store,
        tensors: TensorThread,
        codec: Codec,
        payload: torch.Tensor,
        give_back: Callable[[torch.Tensor], None],
        memory: CodecMemory,
        in_segment: bool = False,
    ) -> None:
        self.codec = codec
        self.in_segment = in_segment
        self._store = store
        self._tensors = tensors
        self.payload = payload
        self._give_back = give_back
        self._memory = memory
        self._is_open = True
        self._num_bytes = payload_bytes(codec, store.layout)
        self._encoded = None if codec.is_identity else memory.free_buffers.lend(self._num_bytes)
        self.target = as_bytes(payload if self._encoded is None else self._encoded)
        self.restart()

    def restart(self) -> None:
        """Forget what has come."""
        self._findings = Findings()  # what is still being looked through adds to the old ones
        self._errors: list[Exception] = []  # of looking through parts
        self._reader = PayloadReader(self._num_bytes, self._write, self._arrived if self.in_segment else None)
        # Of each part, how many bytes have not come.
        num_bytes = self._store.layout.exchange_bytes
        self._left = [min(_PART_BYTES, num_bytes - start) for start in range(0, num_bytes, _PART_BYTES)]

    def go_on(self, in_segment: bool) -> None:
        """The rest comes on another stream; what is here is looked through once more."""
        ranges, self.in_segment = self.ranges, in_segment
        self.restart()
        for start, end in ranges:
            self._reader.has(start, end)
            if self._encoded is None:
                self._arrived(start, end - start)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Of the payload as it travels: bytes [start, end) that are here."""
        return self._reader.ranges

    @property
    def num_bytes(self) -> int:
        """Of the payload as it travels."""
        return self._num_bytes

    @property
    def num_missing(self) -> int:
        return self._num_bytes - self._reader.received

    def check_sum(self) -> int:
        """CRC-32 of what is here, on the tensor thread."""
        crc = 0
        for start, end in self.ranges:
            crc = zlib.crc32(self.target[start:end], crc)
        return crc

    def feed(self, piece: Frame) -> None:
        """Take what came with a message. Raises a BAD_REQUEST refusal for a piece that cannot be."""
        self._reader.feed(piece)

    @property
    def is_complete(self) -> bool:
        return self._reader.is_complete

    def _write(self, offset: int, data: memoryview) -> None:
        self.target[offset : offset + len(data)] = data
        if self._encoded is None:
            self._arrived(offset, len(data))

    def _arrived(self, offset: int, num_bytes: int) -> None:
        """Bytes lie in the payload: look through the parts that have become whole."""
        end = offset + num_bytes
        whole: list[int] = []
        for part in range(offset // _PART_BYTES, -(-end // _PART_BYTES)):
            start = part * _PART_BYTES
            self._left[part] -= min(end, start + _PART_BYTES) - max(offset, start)
            if self._left[part] == 0:
                whole.append(part)
        if whole:  # all between the first and the last, which one piece made whole
            windows = slice(whole[0] * _WINDOWS_AT_ONCE, (whole[-1] + 1) * _WINDOWS_AT_ONCE)
            look = partial(self._store.sanity.look, self.payload, windows, self._findings)
            self._tensors.submit(look, failed=self._errors.append)

    async def judge(self) -> Judgement:
        """What becomes of the whole payload; one that is clipped is changed. Decodes it first."""
        judgement = await self._tensors.run(self._judge)
        if self._errors:
            raise self._errors[0]
        return judgement

    def _judge(self) -> Judgement:
        store = self._store
        if self._encoded is not None:
            try:
                return decode(store, self._memory, self.codec, self._encoded, self.payload)
            finally:
                self._give_back_encoded()
        return store.sanity.judge(self.payload, self._findings, store.weights)

    def take(self) -> torch.Tensor:
        """The payload; whoever takes it gives it back."""
        self._is_open = False
        self._reader.forget()
        return self.payload

    def close(self) -> None:
        """Give the payload back unless it was taken. What is still being looked through is not yet lent again."""
        if self._is_open:
            payload = self.take()
            self._tensors.then(partial(self._give_back, payload))
            self._tensors.then(self._give_back_encoded)

    def _give_back_encoded(self) -> None:
        if self._encoded is not None:
            self._memory.free_buffers.give_back(self._encoded)
            self._encoded = None


class Halves:
    """Uploads whose streams were lost in their middle, until their workers are back, by rank. They use no memory that
    anybody waits for: where it runs out all of them go."""

    def __init__(self) -> None:
        self._of_rank: dict[int, tuple[int, Upload]] = {}

    def keep(self, rank: int, number: int, upload: Upload) -> None:
        """Of the contribution of this number; it is closed when it goes."""
        self.drop(rank)
        self._of_rank[rank] = (number, upload)

    def of(self, rank: int, number: int) -> Upload | None:
        kept, upload = self._of_rank.get(rank, (0, None))
        return upload if kept == number else None

    def has(self, rank: int) -> bool:
        return rank in self._of_rank

    def take(self, rank: int) -> Upload:
        """It is the caller's."""
        return self._of_rank.pop(rank)[1]

    def drop(self, rank: int) -> None:
        if (kept := self._of_rank.pop(rank, None)) is not None:
            kept[1].close()

    def drop_all(self) -> None:
        for rank in list(self._of_rank):
            self.drop(rank)


def decode(store: Store, memory: CodecMemory, codec: Codec, encoded: torch.Tensor, payload: torch.Tensor) -> Judgement:
    """`encoded`, uint8 [payload_bytes], into `payload`; what becomes of it. What cannot be decoded is rejected, that
    contribution alone; refuses BAD_REQUEST where the codec has a memory, which may be another there."""
    try:
        memory.take(codec, encoded, payload)
    except ParamServerError as error:
        if not isinstance(codec, SelfContained):
            raise
        return Judgement("reject", f"bytes that {error.message}", "in every mode")
    return store.sanity.examine(payload, store.weights)
