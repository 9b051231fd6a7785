"""DistributedDataParallel with torch's hook that sends gradients as bfloat16."""

from __future__ import annotations

from typing import Any

from .ddp import DataParallel


class Bf16(DataParallel):
    name = "ddp-bf16"
    only = ("race",)

    def hooked(self, module: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        # By another name, as Gloo sums bfloat16 too: torch admits the hook's own with NCCL only.
        module.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))


ENTRY = Bf16
