"""Encodes payloads in a codec both ways, as a transport would, with error feedback and the shared reference.

Uploads use the worker's `Encoding`, with the outcome of each contribution. Replies use the server's `References`: after
a reply a worker has the newest reference, so the sequence of differences does not matter.
"""

from __future__ import annotations

import torch

from ...common.codecs.base import Codec, begin_payload, check_codecs, take_payload
from ...common.codecs.shared.by_tensor import ByTensor
from ...common.codecs.shared.reference import moves_reference
from ...common.config.schema import Config
from ...common.kinds import ContributionKind
from ...common.registry import CODECS
from ...common.tensors.layout import Layout, new_payload
from ...common.tensors.optimizers import Hyperparameters, OptimizerSpec
from ...common.wire.records import COUNTED, Outcome
from ...ps.core import effects
from ...ps.tensors.model import Model
from ...worker.tensors.transfer import Stretch
from ...worker.transports.encoding import Encoding


def check(config: Config, kind: ContributionKind, described: OptimizerSpec) -> None:
    """Raise UsageError for codecs that do not suit the optimizer, as a joining worker does."""
    worker = config.worker
    groups = list(zip(described.classes, (group.hyperparameters for group in described.groups), strict=True))
    up, down = CODECS.load(worker.codec)(), CODECS.load(worker.reply_codec)()
    check_codecs(config.run.mode, kind, up, down, groups)


class Up:
    """Encodes the contributions of one process. Payloads are uint8 [exchange_bytes]."""

    def __init__(self, config: Config, layout: Layout, optimizer: OptimizerSpec) -> None:
        self._layout = layout
        codec: Codec = CODECS.load(config.worker.codec)()
        self._encoding = Encoding(codec, layout, len(layout.entries))
        self._encoding.of_optimizer([group.hyperparameters for group in optimizer.groups])

    def sent(self, stretch: Stretch, version: int) -> torch.Tensor:
        """Returns the contribution as the server decodes it. `version`: the weights on which it was computed."""
        self._encoding.ready(version)
        self._stretch = stretch
        encoded = torch.frombuffer(self._encoding.whole(stretch), dtype=torch.uint8)
        payload, codec = new_payload(self._layout.exchange_bytes), self._encoding.codec
        take_payload(codec, codec.decoder(self._layout), self._layout, encoded, payload)
        return payload

    def hyperparameters(self, groups: list[Hyperparameters]) -> tuple[Hyperparameters, ...]:
        """Returns the hyperparameters as they are sent with a contribution."""
        return self._encoding.prepared(tuple(groups))

    def replied(self, reply: effects.SendReply, is_work: bool) -> None:
        """Handle the outcome of the newest contribution. `is_work`: the next one includes it if it was dropped."""
        outcome = reply.reply.result.outcome
        if outcome in COUNTED:
            self._encoding.commit()
        else:
            self._encoding.rollback(self._stretch if is_work and outcome is Outcome.DROPPED else None)


class Down:
    """The weights of a run's replies, as workers decode them."""

    def __init__(self, config: Config, model: Model) -> None:
        self._model, self._codec = model, CODECS.load(config.worker.reply_codec)()
        self._newest: tuple[int, torch.Tensor | None] = -1, None

    def weights(self, version: int, is_start: bool) -> torch.Tensor:
        """Returns a copy, shared by all workers with the same weights; `version`: the newest."""
        codec, model = self._codec, self._model
        is_start &= not codec.is_identity
        if isinstance(codec, ByTensor) and moves_reference(codec):
            model.references.replies(version, is_start)
            reference = model.references.of(codec, version)
            (whole,) = reference.update_from(0).made
            return self._kept(reference.number, whole.payload)
        if self._newest[0] == 2 * version + is_start:
            return self._kept(*self._newest)
        layout = model.store.layout
        exact = model.store.weights[: layout.exchange_bytes].clone()
        if not is_start and not codec.is_identity:  # a START is not encoded
            take_payload(
                codec, codec.decoder(layout), layout, begin_payload(codec, codec.encoder(layout), layout, exact), exact
            )
        return self._kept(2 * version + is_start, exact)

    def _kept(self, number: int, payload: torch.Tensor | None) -> torch.Tensor:
        assert payload is not None
        if self._newest[0] != number:
            self._newest = number, payload
        kept = self._newest[1]
        assert kept is not None
        return kept
