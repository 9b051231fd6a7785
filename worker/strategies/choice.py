"""The strategy of a worker of one process, by the run's settings."""

from __future__ import annotations

from ...common.errors import UsageError
from ...common.registry import WITHIN_WORKER, check_codec_of_peers, check_zero
from ..conversation.exchange import Exchange
from .base import Exchanger, Strategy
from .delayed_update import DelayedUpdate, Overlapped
from .direct import Direct


def make_strategy(exchange: Exchange, may_send_early: bool) -> Strategy:
    """`may_send_early`: gradients may leave during backward. Raises UsageError."""
    settings, zero = exchange.settings, exchange.config.zero
    has_peers = settings.kind.has_peers
    if zero == WITHIN_WORKER:
        raise UsageError(
            "worker.zero is 3, and this worker is one process: parameters and gradients are divided among the "
            "processes of a worker, which stay the same; workers come and go, and fully_shard's group cannot",
            fix="ps-launch --group G, or torchrun --nproc-per-node G -m paramserver.worker --group; "
            "--set worker.zero=1 --mode allreduce divides what the optimizer remembers among workers",
        )
    if zero:
        check_zero(zero, settings.mode, has_peers, settings.outstanding)
    if not has_peers:
        return make_server_strategy(exchange, exchange if may_send_early else None)
    if exchange.config.codec != "raw":
        check_codec_of_peers(exchange.config.codec, zero, settings.outstanding)
    # These load torch.distributed.
    if settings.outstanding:
        from .collectives.delayed import Delayed

        return Delayed(exchange)
    if zero:
        from .collectives.zero import Zero

        return Zero(exchange, may_send_early)
    from .all_reduce import AllReduceStrategy

    return AllReduceStrategy(exchange, may_send_early)


def make_server_strategy(exchange: Exchanger, early: Exchange | None = None) -> Strategy:
    """The strategy of a mode in which the server has the weights; gradients may leave early through `early`."""
    settings = exchange.settings
    if settings.kind.holds_differences and (settings.delayed_update or settings.fragments > 1):
        return Overlapped(exchange)
    return DelayedUpdate(exchange) if settings.delayed_update else Direct(exchange, early)
