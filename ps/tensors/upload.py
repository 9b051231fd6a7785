"""An upload: the memory that a contribution arrives in, the received bytes, and the findings so far.

Pieces may arrive in any order, and before the contribution that they belong to. Each complete part is examined at once
(`sanity.py`), while it is in the cache and other parts are still arriving. `judge` makes a judgement of the findings
(`common/tensors/judgement.py`), which the run acts on (`ps/core/contributions.py`).
"""

from __future__ import annotations

import zlib
from functools import partial

import torch

from ...common.codecs.base import Codec, FreeBuffers, decode_payload, payload_bytes
from ...common.errors import ParamServerError
from ...common.tensors.judgement import Judgement
from ...common.tensors.layout import as_bytes
from ...common.wire.frames import PayloadReader
from .flat_optimizer import WINDOW_BYTES
from .model import Model
from .sanity import Findings
from .thread import TensorThread

# Windows that are examined together. With fewer, the change to the tensor thread would cost more than the work.
_WINDOWS_AT_ONCE = 2
_PART_BYTES = _WINDOWS_AT_ONCE * WINDOW_BYTES


class Upload:
    """Receives one payload, encoded with `codec`, into `payload`, uint8 [layout.exchange_bytes].

    `reader` takes the pieces, and knows which bytes of the encoded payload have arrived. With `in_segment`, the bytes
    arrive outside of messages: in memory that the worker shares, or on a direct connection. Encoded bytes are in a
    buffer of `free_buffers`.
    """

    def __init__(
        self, model: Model, tensors: TensorThread, codec: Codec, payload: torch.Tensor,
        free_buffers: FreeBuffers, in_segment: bool,
    ) -> None:  # fmt: skip
        self.codec, self.payload, self.in_segment = codec, payload, in_segment
        self._store, self._tensors, self._free_buffers = model.store, tensors, free_buffers
        self._give_back, self._is_lent = model.staging.give_back, not model.staging.is_own(payload)
        self._is_open = True
        self.num_bytes = payload_bytes(codec, model.store.layout)  # of the encoded payload
        self._encoded = None if codec.is_identity else free_buffers.lend(self.num_bytes)
        self.target = as_bytes(payload if self._encoded is None else self._encoded)
        self.restart()

    def restart(self, ranges: list[tuple[int, int]] | None = None) -> None:
        """Start over, but keep the bytes in `ranges`, which are examined again."""
        self._findings = Findings()  # work that still runs adds to the old object
        self._errors: list[Exception] = []  # errors while examining parts
        self.reader = PayloadReader(self.num_bytes, self._write, self._arrived if self.in_segment else None)
        num_bytes = self._store.layout.exchange_bytes
        # The number of missing bytes of each part.
        self._missing = [min(_PART_BYTES, num_bytes - start) for start in range(0, num_bytes, _PART_BYTES)]
        for start, end in ranges or ():
            self.reader.has(start, end)
            if self._encoded is None:
                self._arrived(start, end - start)

    def check_sum(self) -> int:
        """Return the CRC-32 of the received bytes. It runs on the tensor thread."""
        crc = 0
        for start, end in self.reader.ranges:
            crc = zlib.crc32(self.target[start:end], crc)
        return crc

    def _write(self, offset: int, data: memoryview) -> None:
        self.target[offset : offset + len(data)] = data
        if self._encoded is None:
            self._arrived(offset, len(data))

    def _arrived(self, offset: int, num_bytes: int) -> None:
        """Count received bytes of the payload, and examine the parts that are now complete."""
        end = offset + num_bytes
        whole: list[int] = []
        for part in range(offset // _PART_BYTES, -(-end // _PART_BYTES)):
            start = part * _PART_BYTES
            self._missing[part] -= min(end, start + _PART_BYTES) - max(offset, start)
            if self._missing[part] == 0:
                whole.append(part)
        if whole:  # one piece may complete several consecutive parts
            windows = slice(whole[0] * _WINDOWS_AT_ONCE, (whole[-1] + 1) * _WINDOWS_AT_ONCE)
            look = partial(self._store.sanity.look, self.payload, windows, self._findings)
            self._tensors.submit(look, failed=self._errors.append)

    async def judge(self) -> Judgement:
        """Decode the complete payload, and return its judgement. Clipping changes the payload."""
        judgement = await self._tensors.run(self._judge)
        if self._errors:
            raise self._errors[0]
        return judgement

    def _judge(self) -> Judgement:
        store = self._store
        if self._encoded is None:
            if self._is_lent and store.sanity.changes(self._findings):
                self.payload = self.payload.clone()  # the worker may keep it as a gradient
            return store.sanity.judge(self.payload, self._findings, store.weights)
        try:
            decode_payload(self.codec, store.layout, self._encoded, self.payload)
        except ParamServerError as error:
            return Judgement("reject", f"bytes that {error.message}", "in every mode")
        finally:
            self._give_back_encoded()
        return store.sanity.examine(self.payload, store.weights)

    def take(self) -> torch.Tensor:
        """Return the payload, which the caller must give back."""
        self._is_open = False
        self.reader.forget()
        return self.payload

    def close(self) -> None:
        """Give the payload back unless `take` returned it. This happens after the work that still reads it."""
        if self._is_open:
            self._tensors.then(partial(self._give_back, self.take()))
            self._tensors.then(self._give_back_encoded)

    def _give_back_encoded(self) -> None:
        if self._encoded is not None:
            self._free_buffers.give_back(self._encoded)
            self._encoded = None
