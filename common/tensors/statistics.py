"""Finds the buffers of a model that are running statistics, which a run averages over its workers.

The mean of queues, pointers, codebooks or masks has no meaning. So a run averages only the statistics of known layers,
and buffers that the script names. Other buffers follow the lowest live rank, as in DistributedDataParallel, which
broadcasts those of rank 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from ..errors import UsageError, did_you_mean

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a layer of the model can normalise with the statistics of a batch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def batch_norms(model: nn.Module, with_synchronized: bool) -> list[str]:
    """Return the names of the layers in training mode that normalise with the statistics of a batch.

    torch.nn.SyncBatchNorm is included only if `with_synchronized`.
    """
    found = ((name, item) for name, item in model.named_modules() if isinstance(item, _BatchNorm) and item.training)
    return [name for name, item in found if with_synchronized or not isinstance(item, nn.SyncBatchNorm)]


def statistics_of(
    model: nn.Module, named: Mapping[str, torch.Tensor], averaged_buffers: Collection[str] = ()
) -> frozenset[str]:
    """Return the names of the running statistics among `named`, the tensors of a model's state_dict.

    `averaged_buffers` are further names from the script. Raises UsageError for a name that is not a buffer, or for a
    buffer of integers, which have no mean.
    """
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    known = {id(norm._buffers.get(key)) for norm in norms for key in _STATISTICS}
    buffers = {name: tensor for name, tensor in named.items() if not isinstance(tensor, nn.Parameter)}
    named_by_script = (averaged_buffers,) if isinstance(averaged_buffers, str) else averaged_buffers
    for name in named_by_script:
        if (item := buffers.get(name)) is None:
            fix = did_you_mean(name, list(buffers)) if buffers else "leave averaged_buffers out: it has no buffers"
            raise UsageError(f"averaged_buffers: the model has no buffer '{name}'", fix=fix)
        if not item.is_floating_point() and id(item) not in known:
            dtype = str(item.dtype).removeprefix("torch.")
            message = f"averaged_buffers: '{name}' is {dtype}, and integers have no mean"
            raise UsageError(message, fix="leave it out: it follows the lowest live rank")
    return frozenset(named_by_script) | {name for name, buffer in buffers.items() if id(buffer) in known}
