"""The encoded reply of a version: made once, shared by every worker that gets it.

At most `limit` versions are held in memory; when that many are still being sent, the next
one waits until a reader is done. Who waits gets a version at least as new as it asked for.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator

from ..common.layout import as_bytes
from ..common.wire import INLINE_BYTES, body_frames
from .store import Store
from .tensor_thread import TensorThread


class EncodedReply:
    """Parameters and buffers of one version as messages; as one piece when the body is small."""

    def __init__(self, version: int, num_bytes: int, inline: bytes | None, frames: list[bytes]) -> None:
        self.version = version
        self.num_bytes = num_bytes
        self.inline = inline
        self.frames = frames


class Replies:
    """Encodes on the tensor thread, so a reply is always of one version."""

    def __init__(self, store: Store, tensors: TensorThread, limit: int) -> None:
        self._store = store
        self._tensors = tensors
        self._body = as_bytes(store.weights)[: store.layout.exchange_bytes]
        # A body that travels in the answer itself is copied once and takes no slot.
        self._is_inline = len(self._body) <= INLINE_BYTES
        self._num_free = limit
        self._freed = asyncio.Event()
        self._latest: EncodedReply | None = None
        self._encoding: asyncio.Future[None] | None = None

    async def get(self, min_version: int) -> EncodedReply:
        """The weights of a version >= `min_version`, which the store must have reached."""
        if self._is_inline:
            if self._latest is None or self._latest.version < self._store.version:
                self._latest = self._encode()
            return self._latest
        while (latest := self._latest) is None or latest.version < min_version:
            if self._encoding is not None:
                await asyncio.shield(self._encoding)
                continue
            self._encoding = asyncio.get_running_loop().create_future()
            try:
                await self._take_slot()
                reply = await self._tensors.run(self._encode)
                weakref.finalize(reply, self._free_slot)
                self._latest = reply
            finally:
                encoding, self._encoding = self._encoding, None
                encoding.set_result(None)
        return latest

    def frozen_frames(self) -> Iterator[bytes]:
        """The part of a body after parameters and buffers, which never changes; made as it is sent."""
        start = self._store.layout.exchange_bytes
        return body_frames([as_bytes(self._store.weights)[start:]], offset=start)

    def _encode(self) -> EncodedReply:
        if self._is_inline:
            return EncodedReply(self._store.version, len(self._body), bytes(self._body), [])
        return EncodedReply(self._store.version, len(self._body), None, list(body_frames([self._body])))

    async def _take_slot(self) -> None:
        self._latest = None  # it has a slot of its own unless somebody still sends it
        while self._num_free == 0:
            self._freed.clear()
            await self._freed.wait()
        self._num_free -= 1

    def _free_slot(self) -> None:
        self._num_free += 1
        self._freed.set()
