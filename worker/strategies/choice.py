"""Chooses the strategy of a worker of one process from the run's settings."""

from __future__ import annotations

from ..conversation.exchange import Exchange
from .base import BlockingStrategy, Exchanger, Strategy
from .delayed_update import DelayedUpdate, Overlapped


def make_strategy(exchange: Exchange, may_send_early: bool) -> Strategy:
    """Return the strategy. `may_send_early`: gradients may be sent during backward."""
    settings, zero = exchange.settings, exchange.config.zero
    if not settings.kind.has_peers:
        return make_server_strategy(exchange, exchange if may_send_early else None)
    # These load torch.distributed.
    if settings.outstanding:
        from .collectives.delayed import Delayed

        return Delayed(exchange)
    if zero:
        from .collectives.zero import Zero

        return Zero(exchange, may_send_early)
    from .all_reduce import AllReduceStrategy

    return AllReduceStrategy(exchange, may_send_early)


def make_server_strategy(exchange: Exchanger, early: Exchange | None = None, waits: bool = False) -> Strategy:
    """Return the strategy of a mode in which the server has the weights. `early` sends gradients during backward.

    `waits`: for each reply, whatever the run's settings say.
    """
    settings = exchange.settings
    waits |= not settings.delayed_update
    if settings.kind.holds_differences and (settings.fragments > 1 or not waits):
        return Overlapped(exchange, waits)
    return BlockingStrategy(exchange, early) if waits else DelayedUpdate(exchange)
