"""The codec of a worker's contributions, as configured or chosen by `auto`, and the residuals that it keeps."""

from __future__ import annotations

import math

from ...common.config.schema import WorkerConfig
from ...common.registry import AUTO, CODECS
from ...common.reporting.log import get_logger
from ...common.tensors.layout import Layout
from ...common.wire.records import COUNTED, Reply, ResidualInfo
from ..session import Progress
from ..transports.auto.measuring import Auto, Passed, round_trip_s
from ..transports.encoding import Encoding
from .shard_set import ShardSet

log = get_logger()


class CodecChoice:
    """The codec choice of one worker. `auto` is set if `worker.codec` is auto."""

    def __init__(self, config: WorkerConfig, shards: ShardSet) -> None:
        self._config, self._shards = config, shards
        self.encoding: Encoding | None = None  # of gradients between peers
        self.auto = Auto(config.reply_codec, config.max_mbit) if config.codec == AUTO else None
        self._passed: list[Passed] = []  # exchanges of the newest contribution
        self._num_lost, self._norm_lost = 0, 0.0  # lost residuals, and the sum of their norms

    @property
    def candidates(self) -> tuple[str, ...]:
        return (self._shards.codec,) if self.auto is None else self.auto.candidates

    @property
    def holds_back(self) -> bool:
        """Whether the next contribution must be sent as a whole, after backward."""
        if self.auto is None:
            return False
        return self.auto.measures or (
            self.auto.codec == "raw" and any(shard.up.encoding.owes for shard in self._shards.all)
        )

    def log(self) -> None:
        up, down = self._config.codec, self._config.reply_codec
        if {up, down} != {"raw"}:
            meaning = "these encode contributions and weights on the wire; the server's own state stays exact"
            log.info("codecs", up=up, down=down, meaning=meaning)

    def joined(self) -> None:
        """Called when new streams are open."""
        if self.auto is not None:
            shards = self._shards.all
            carries_codecs = all(shard.transports.transport.carries_codecs for shard in shards)
            self.auto.joined(carries_codecs, all(shard.is_here for shard in shards))

    def started(self, layout: Layout, is_delayed: bool) -> None:
        """Called when the model and the link are known."""
        if self.auto is not None:
            self.auto.meet(layout, round_trip_s(self._shards.first.rpc.status), is_delayed)

    def use(self) -> None:
        """Use the chosen codec from the next contribution on."""
        for shard in self._shards.all:
            if self.auto is not None and shard.up.encoding.codec.name != self.auto.codec:
                shard.up.encoding.use(CODECS.load(self.auto.codec)())

    # ---- measurements -------------------------------------------------------------------------

    def clear(self) -> None:
        """Discard the measurements of an attempt."""
        self._passed = []

    def passed(self, passed: Passed) -> None:
        """Record one shard's exchange of a contribution. Several threads call it."""
        self._passed.append(passed)

    def replied(self, reply: Reply, compute_s: float, local_steps: int, progress: Progress) -> None:
        if self.auto is not None and reply.result.outcome in COUNTED:
            self.auto.counted(self._passed, compute_s, local_steps, progress.training_steps)
            self.use()

    # ---- residuals ----------------------------------------------------------------------------

    @property
    def residual(self) -> ResidualInfo:
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
