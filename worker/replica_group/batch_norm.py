"""torch.nn.SyncBatchNorm over the processes of a replica group, with the statistics of all their samples.

torch's own layer needs a GPU and the script's init_process_group(). Without the latter it is plain BatchNorm, without a
warning. So these layers get this forward pass, over the group's own connections, unless torch's works. Mean and
variance are two sums over the group. The gradient of such a sum is the sum of all gradients (Ioffe and Szegedy 2015;
torch's SyncBatchNorm does the same in its own kernels).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .group import Group

_group: Group | None = None  # of this process; not an attribute of a layer, because a model with it could not be copied


class _Sum(torch.autograd.Function):
    """A sum over all processes of the group."""

    @staticmethod
    def forward(_: Any, mine: torch.Tensor) -> torch.Tensor:
        assert _group is not None
        return _group.sum_of(mine)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        assert _group is not None
        return _group.sum_of(gradient)


class GroupBatchNorm(nn.SyncBatchNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or _group is None:
            return super().forward(input)
        self._check_input_dim(input)
        axes, shape = [0, *range(2, input.dim())], [1, -1, *[1] * (input.dim() - 2)]
        values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        num_local = values.new_full((1,), values.numel() // values.shape[1])
        sums, count = _Sum.apply(torch.cat([values.sum(axes), num_local])).split([values.shape[1], 1])
        count = count.detach()
        if count.item() < 2:  # torch's layers raise it too: the unbiased variance would be NaN
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
        mean = sums / count
        apart = values - mean.view(shape)
        variance = _Sum.apply((apart * apart).sum(axes)) / count
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            # Update the running statistics as torch does, with the unbiased variance.
            self.num_batches_tracked.add_(1)
            part = 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), part)
            unbiased = variance.detach() * count / (count - 1)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), part)
        found = apart * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            found = found * self.weight.view(shape) + self.bias.view(shape)
        return found.to(input.dtype)


def synchronize(model: nn.Module, group: Group) -> bool:
    """Give a model's SyncBatchNorm layers this forward pass. Returns False if no layer needs it."""
    layers = [module for module in model.modules() if type(module) is nn.SyncBatchNorm]
    is_torchs = dist.is_initialized() and all(parameter.is_cuda for parameter in model.parameters())
    if not layers or is_torchs or group.size < 2:
        return False
    global _group
    _group = group
    for layer in layers:
        layer.__class__ = GroupBatchNorm
    return True
