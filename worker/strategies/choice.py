"""Which strategy a worker has: chosen once, from the run's settings."""

from __future__ import annotations

from ..conversation.exchange import Exchange
from ..tensors.transfer import ModelTensors
from .direct import Direct
from .pipelined import Pipelined


def make_strategy(exchange: Exchange, model: ModelTensors, may_send_early: bool) -> Direct:
    """The one the run's settings ask for; `may_send_early`: gradients may leave during backward."""
    if exchange.settings.pipelined:
        return Pipelined(exchange, model)
    return Direct(exchange, model, may_send_early)
