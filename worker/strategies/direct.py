"""The strategy of a worker that exchanges its contribution and waits for the answer."""

from __future__ import annotations

from ...common.tensors.optimizers import OptimizerSpec
from ..conversation.exchange import Exchange
from ..conversation.messages import Final
from ..tensors.transfer import ModelTensors, Source
from .base import Work
from .early import MIN_MODEL_BYTES, EarlySender


class Direct:
    """Every contribution is answered before the next step begins."""

    def __init__(self, exchange: Exchange, model: ModelTensors, may_send_early: bool) -> None:
        self._exchange = exchange
        self._may_send_early = may_send_early and model.layout.exchange_bytes >= MIN_MODEL_BYTES
        self._early: EarlySender | None = None
        self._model = model
        self.progress = exchange.progress
        self.source: Source = exchange.settings.source

    def start(self, optimizer: OptimizerSpec) -> None:
        self._exchange.start(self._model, optimizer)
        if self._may_send_early and self.source == "gradient" and self._exchange.codec_name == "raw":
            self._early = EarlySender(self._exchange, self._model)

    def contribute(self, work: Work) -> None:
        if self._early is not None:
            self._early.settle()
        self._exchange.contribute(self.source, *work)

    def finish(self, can_evaluate: bool) -> Final | None:
        return self._exchange.finish(can_evaluate)

    def leave(self, figures: dict[str, float], is_interrupted: bool) -> None:
        self._exchange.leave(figures)

    def drop(self) -> None:
        self._exchange.drop()
