"""Strategy of the server modes: exchange a contribution and wait for its reply."""

from __future__ import annotations

from ...common.errors import UsageError
from ...common.tensors.optimizers import OptimizerSpec
from ...common.wire.records import Base, PayloadInfo
from ..conversation.exchange import Exchange
from ..conversation.messages import Outgoing
from ..tensors.local_steps import Anchor
from ..tensors.transfer import ModelTensors
from ..tensors.watch import Watch
from .base import Exchanger, Strategy
from .early import MIN_MODEL_BYTES, EarlySender


class BlockingStrategy(Strategy):
    """Waits for a contribution's reply and its weights before the next step begins.

    With `early`, gradients are sent through that exchange during backward.
    """

    def __init__(self, exchange: Exchanger, early: Exchange | None = None) -> None:
        super().__init__(exchange)
        self._early_exchange = early if self.kind.holds_gradients else None
        self._early: EarlySender | None = None
        self._watch: Watch | None = None  # set if only the server changes weights
        self._anchor: Anchor | None = None  # set if deltas are exchanged

    def _start(self, model: ModelTensors, optimizer: OptimizerSpec, is_parted: bool) -> None:
        self._exchange.start(model, optimizer)
        may_send_early = not is_parted and model.layout.exchange_bytes >= MIN_MODEL_BYTES
        if self._early_exchange is not None and may_send_early:
            self._early = EarlySender(self._early_exchange, model)
            self._ready_gradients = self._early.gradients
        self._watch = None if self.kind.worker_steps else Watch(model)
        if self.kind.holds_differences:
            self._anchor = Anchor(model)

    def _note_weights(self) -> None:
        if self._watch is not None:
            self._watch.note()
        if self._anchor is not None:
            self._anchor.note()

    def check_model(self) -> None:
        self._find_model()
        if self._watch is not None and (changed := self._watch.changed()):
            rest = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise UsageError(
                f"weights ('{changed[0]}'{rest}) were changed between two steps, not by this optimizer: in mode "
                f"{self.settings.mode} the server owns the weights, so the change would be lost",
                fix="load or initialise weights before session.optimizer(), which uploads them; if a loop changes "
                "weights temporarily (to evaluate an average, say), restore them before step()",
            )

    def _contribute(self, outgoing: Outgoing) -> None:
        if self._anchor is not None:
            self._anchor.measure()
        if self._early is not None:
            self._early.settle()
        self._exchange.contribute(self._described(outgoing))

    def _described(self, outgoing: Outgoing) -> Outgoing:
        """Add the list of parameters that have no gradient in this step."""
        if self.kind.worker_steps:
            return outgoing
        payload = PayloadInfo(without_gradient=self._model.without_gradient())
        return outgoing.changed(payload=payload, base=Base(has_all=outgoing.contribution.counts.part > 0))
