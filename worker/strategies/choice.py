"""Which strategy a run's settings ask for."""

from __future__ import annotations

from ..conversation.exchange import Exchange
from .direct import Direct
from .overlapped import Overlapped
from .pipelined import Pipelined


def make_strategy(exchange: Exchange, may_send_early: bool, may_come_late: bool = False) -> Direct:
    """For `may_send_early` and `may_come_late` see Direct."""
    settings = exchange.settings
    if settings.source == "report":
        if settings.outstanding:
            from .delayed import Delayed

            return Delayed(exchange)
        from .equals import Equals  # loads torch.distributed

        return Equals(exchange, may_send_early)
    if not settings.pipelined:
        return Direct(exchange, may_send_early, may_come_late)
    return Overlapped(exchange) if settings.source == "delta" else Pipelined(exchange)
