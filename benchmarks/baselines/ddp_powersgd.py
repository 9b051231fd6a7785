"""DistributedDataParallel with torch's PowerSGD hook: rank 1, its default, and with error feedback."""

from __future__ import annotations

from typing import Any

from .ddp import DataParallel

_WHOLE_STEPS = 2  # before compression, the fewest it takes; its default, 1,000, is more than a race has


class PowerSgd(DataParallel):
    name = "ddp-powersgd"
    only = ("race",)

    def hooked(self, module: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

        state = power_sgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=_WHOLE_STEPS)
        module.register_comm_hook(state, power_sgd.powerSGD_hook)


ENTRY = PowerSgd
