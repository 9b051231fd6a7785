"""Uploads whose streams broke off in their middle: a worker that is back sends only the bytes that are missing.

The worker's side is `worker/transports/partial_transfer.py`.
"""

from __future__ import annotations

from contextlib import suppress

from ...common.reporting.log import get_logger
from ...proto import parameter_server_pb2 as pb
from ..engine.engine import Engine
from ..engine.peers import Peer
from ..tensors.upload import Upload
from .stream import StreamLost

log = get_logger()

_LEAST_BYTES = 16 << 20  # a smaller payload is sent again whole
_ENDED_S = 1.0  # within which the old stream of a process that is back is over


class PartialTransfers:
    """At most one upload of each rank, until its process ends. They lie in memory of the staging pool, and go as soon
    as anybody waits for that."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._model, self._tensors = engine, engine.model, engine.tensors
        self._uploads: dict[int, tuple[int, Upload]] = {}  # by rank, with the contribution's sequence number
        engine.folding.on_drop.append(self.drop)

    def keep(self, peer: Peer, seq: int, upload: Upload) -> bool:
        """Keep the upload of a lost stream; False: it stays the caller's."""
        staging = self._model.staging
        is_worth_it = upload.num_bytes > _LEAST_BYTES and upload.ranges and not upload.is_complete
        if not is_worth_it or not staging.is_own(upload.payload) or staging.num_waiting:
            return False
        if not self._engine.may_return(peer):
            return False
        self.drop(peer.rank)
        self._uploads[peer.rank] = seq, upload
        return True

    async def offer(self, peer: Peer) -> pb.PartialTransfer | None:
        """The bytes that are here of the next contribution of a process that is back."""
        engine, seq = self._engine, peer.number + 1
        if not peer.is_resumed:
            return None
        with suppress(TimeoutError):
            await engine.until(
                lambda: all(seat == peer.seat or seat[0] != peer.rank for seat in engine.peers), _ENDED_S
            )
        if (upload := self._upload_of(peer.rank, seq)) is None:
            return None
        ranges, crc = upload.ranges, await self._tensors.run(upload.check_sum)
        if self._upload_of(peer.rank, seq) is not upload:
            return None
        borders = [border for found in ranges for border in found]
        return pb.PartialTransfer(
            seq=seq, payload_bytes=upload.num_bytes, codec=upload.codec.name, crc=crc, ranges=borders
        )

    def take(self, rank: int, seq: int) -> Upload:
        """The upload, which is the caller's from here on. StreamLost where its memory was needed: the worker joins
        again, and a refusal would end its membership."""
        if (upload := self._upload_of(rank, seq)) is None:
            log.info("not_continued", rank=rank, seq=seq, meaning="the memory is used: the worker joins again")
            raise StreamLost
        del self._uploads[rank]
        return upload

    def _upload_of(self, rank: int, seq: int) -> Upload | None:
        kept_seq, upload = self._uploads.get(rank, (0, None))
        return upload if kept_seq == seq else None

    def has(self, rank: int) -> bool:
        return rank in self._uploads

    def drop(self, rank: int) -> None:
        if (kept := self._uploads.pop(rank, None)) is not None:
            kept[1].close()

    def drop_all(self) -> None:
        for rank in list(self._uploads):
            self.drop(rank)
