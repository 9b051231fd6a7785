"""The residuals of a worker's contributions: their norms, and how much of them was lost."""

from __future__ import annotations

import math

from ...common.reporting.log import get_logger
from ...common.wire.records import ResidualInfo
from ..transports.encoding import Encoding
from .shard_set import ShardSet

log = get_logger()


class Residuals:
    """The residuals of one worker: of each shard's part, or of the gradients between peers."""

    def __init__(self, shards: ShardSet) -> None:
        self._shards = shards
        self.encoding: Encoding | None = None  # of gradients between peers
        self._num_lost, self._norm_lost = 0, 0.0  # lost residuals, and the sum of their norms

    @property
    def info(self) -> ResidualInfo:
        """The norm of all residuals, and the number and norms of lost ones."""
        norm = math.hypot(*(encoding.norm for encoding in self._encodings))
        return ResidualInfo(norm, self._num_lost, self._norm_lost)

    @property
    def _encodings(self) -> list[Encoding]:
        return [shard.up.encoding for shard in self._shards.all] if self.encoding is None else [self.encoding]

    def count_lost(self, rank: int | None) -> None:
        """Count residuals that were lost since the last call. Losses on several shards count once."""
        found = [lost for encoding in self._encodings if (lost := encoding.take_lost()) is not None]
        if not found:
            return
        norm, codec = math.hypot(*found), self._encodings[0].codec.name
        self._num_lost, self._norm_lost = self._num_lost + 1, self._norm_lost + norm
        log.info("residual_lost", rank=rank, codec=codec, norm=f"{norm:.4g}", num=self._num_lost)
