"""Which strategy a run's settings ask for."""

from __future__ import annotations

from ...common.errors import UsageError
from ...common.registry import WITHIN_WORKER, check_zero
from ..conversation.exchange import Exchange
from .delayed_update import DelayedUpdate
from .direct import Direct
from .overlapped import Overlapped


def make_strategy(exchange: Exchange, may_send_early: bool) -> Direct:
    """For `may_send_early` see Direct."""
    settings = exchange.settings
    if exchange.zero == WITHIN_WORKER:
        raise UsageError(
            "worker.zero is 3, and this worker is one process: parameters and gradients are divided among the "
            "processes of a worker, which stay the same; workers come and go, and fully_shard's group cannot",
            fix="ps-launch --group G, or torchrun --nproc-per-node G -m paramserver.worker --group; "
            "--set worker.zero=1 --mode allreduce divides what the optimizer remembers among workers",
        )
    has_peers = settings.kind.has_peers
    if exchange.zero:
        check_zero(exchange.zero, settings.mode, has_peers, settings.outstanding)
    if has_peers:
        return _among_peers(exchange, may_send_early)
    if not settings.delayed_update:
        return Direct(exchange, may_send_early)
    return Overlapped(exchange) if settings.kind.holds_differences else DelayedUpdate(exchange)


def _among_peers(exchange: Exchange, may_leave_early: bool) -> Direct:
    """They load torch.distributed."""
    if exchange.settings.outstanding:
        from .collectives.delayed import Delayed

        return Delayed(exchange)
    if exchange.zero:
        from .collectives.zero import Zero

        return Zero(exchange, may_leave_early)
    from .all_reduce import AllReduceStrategy

    return AllReduceStrategy(exchange, may_leave_early)
