"""DistributedDataParallel with post-local SGD: gradients are not exchanged, weights averaged every few steps."""

from __future__ import annotations

from typing import Any

from ..rig.racer import LOCAL_STEPS
from .ddp import DataParallel


class PostLocalSgd(DataParallel):
    name = "ddp-localsgd"
    only = ("race",)

    def hooked(self, module: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local

        # No intermediate group: between two averages each worker is on its own.
        state = post_local.PostLocalSGDState(None, None, LOCAL_STEPS, post_local_gradient_allreduce=False)
        module.register_comm_hook(state, post_local.post_localSGD_hook)

    def stepping(self, optimizer: Any) -> Any:
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        return PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(LOCAL_STEPS, warmup_steps=LOCAL_STEPS))


ENTRY = PostLocalSgd
