"""Keeps uploads whose stream was lost. When the worker is back, it sends only the missing bytes.

The worker's side is `worker/transports/transport.py`.
"""

from __future__ import annotations

from contextlib import suppress

from ...common.reporting.log import get_logger
from ...proto import parameter_server_pb2 as pb
from ..engine.engine import Engine
from ..engine.folding import Peer
from ..tensors.upload import Upload
from .stream import StreamLost

log = get_logger()

_LEAST_BYTES = 16 << 20  # a worker sends a smaller payload again completely
_ENDED_S = 1.0  # time for the old stream of a returning process to end


class PartialTransfers:
    """Keeps at most one upload for each rank, until its process ends.

    The uploads use memory of the staging pool. They are dropped as soon as another upload waits for memory.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._model, self._tensors = engine, engine.model, engine.tensors
        self._uploads: dict[int, tuple[int, Upload]] = {}  # by rank, with the contribution's sequence number
        engine.released = self.drop

    def keep(self, peer: Peer, seq: int, upload: Upload) -> bool:
        """Keep the upload of a lost stream. Returns False if the caller must close it."""
        staging = self._model.staging
        is_worth_it = upload.num_bytes > _LEAST_BYTES and 0 < upload.reader.received < upload.num_bytes
        is_possible = staging.is_own(upload.payload) and not staging.num_waiting and self._engine.may_return(peer)
        if not (is_worth_it and is_possible):
            return False
        self.drop(peer.rank)
        self._uploads[peer.rank] = seq, upload
        return True

    async def offer(self, peer: Peer) -> pb.PartialTransfer | None:
        """Return the received ranges of a returning process's next contribution, or None."""
        engine, seq = self._engine, peer.number + 1
        if not peer.is_resumed:
            return None
        with suppress(TimeoutError):
            await engine.until(
                lambda: all(seat == peer.seat or seat[0] != peer.rank for seat in engine.peers), _ENDED_S
            )
        if (upload := self._upload_of(peer.rank, seq)) is None:
            return None
        ranges, crc = upload.reader.ranges, await self._tensors.run(upload.check_sum)
        if self._upload_of(peer.rank, seq) is not upload:
            return None
        borders = [border for found in ranges for border in found]
        return pb.PartialTransfer(
            seq=seq, payload_bytes=upload.num_bytes, codec=upload.codec.name, crc=crc, ranges=borders
        )

    def take(self, rank: int, seq: int) -> Upload:
        """Return the kept upload, which the caller then owns.

        Raises StreamLost if the upload was dropped for its memory. The worker then joins again. A refusal instead would
        end its membership.
        """
        if (upload := self._upload_of(rank, seq)) is None:
            meaning = "another upload needed the memory; the worker joins again"
            log.info("not_continued", rank=rank, seq=seq, meaning=meaning)
            raise StreamLost
        del self._uploads[rank]
        return upload

    def _upload_of(self, rank: int, seq: int) -> Upload | None:
        kept_seq, upload = self._uploads.get(rank, (0, None))
        return upload if kept_seq == seq else None

    def has(self, rank: int) -> bool:
        """Whether an upload of this rank is kept."""
        return rank in self._uploads

    def drop(self, *ranks: int) -> None:
        """Drop the uploads of these ranks, or of all ranks if none is named."""
        for rank in ranks or tuple(self._uploads):
            if (kept := self._uploads.pop(rank, None)) is not None:
                kept[1].close()
