"""Strategy of the server modes: exchange a contribution and wait for its reply."""

from __future__ import annotations

from ...common.tensors.optimizers import OptimizerSpec
from ...common.wire.records import Base, PayloadInfo
from ..conversation.exchange import Exchange
from ..conversation.messages import Outgoing
from ..tensors.local_steps import Anchor
from ..tensors.transfer import ModelTensors
from .base import Exchanger, Strategy
from .early import MIN_MODEL_BYTES, EarlySender


class BlockingStrategy(Strategy):
    """Waits for a contribution's reply and its weights before the next step begins.

    With `early`, gradients are sent through that exchange during backward.
    """

    def __init__(self, exchange: Exchanger, early: Exchange | None = None) -> None:
        super().__init__(exchange)
        self._early_exchange = early if self.kind.holds_gradients else None
        self._anchor: Anchor | None = None  # set if deltas are exchanged

    def _start(self, model: ModelTensors, optimizer: OptimizerSpec, is_parted: bool) -> None:
        self._exchange.start(model, optimizer)
        may_send_early = not is_parted and model.layout.exchange_bytes >= MIN_MODEL_BYTES
        if self._early_exchange is not None and may_send_early:
            self._ready_gradients = EarlySender(self._early_exchange, model)
        if self.kind.holds_differences:
            self._anchor = Anchor(model)

    def _note_weights(self) -> None:
        if self._anchor is not None:
            self._anchor.note()

    def _contribute(self, outgoing: Outgoing) -> None:
        if self._anchor is not None:
            self._anchor.measure()
        if self._ready_gradients is not None:
            self._ready_gradients.settle()
        if not self.kind.worker_steps:
            without, is_part = self._model.without_gradient(), outgoing.contribution.counts.part > 0
            if without or is_part:
                outgoing = outgoing.changed(payload=PayloadInfo(without_gradient=without), base=Base(has_all=is_part))
        self._exchange.contribute(outgoing)
