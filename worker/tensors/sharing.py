"""Refuses parameters that share memory with another tensor. Python's identity of tensors does not show it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ...common.errors import UsageError


def check_memory(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises UsageError for a trained parameter whose elements are also elements of another tensor, or of itself.

    Each tensor is stepped and written by itself, so two names of one memory would be two different tensors.
    """
    by_storage: dict[int, list[tuple[int, int, str]]] = {}  # first byte, end and name
    for name, tensor in tensors.items():
        if tensor.device.type == "meta" or type(tensor).__name__ == "DTensor" or not tensor.numel():
            continue
        if is_trained(tensor) and any(size > 1 and not step for size, step in _strides(tensor)):
            raise UsageError(
                f"parameter '{name}' is expanded: several of its elements are one number in memory",
                fix="give it memory of its own before session.optimizer(): nn.Parameter(tensor.expand(...).clone())",
            )
        start = int(tensor.storage_offset()) * tensor.itemsize
        length = 1 + sum((size - 1) * step for size, step in _strides(tensor))
        end = start + length * tensor.itemsize
        by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((start, end, name))
    for found in by_storage.values():
        found.sort()
        for index, (_, end, name) in enumerate(found):
            for start, _, other in found[index + 1 :]:
                if start >= end:
                    break
                _check_pair(name, tensors[name], other, tensors[other])


def is_trained(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _strides(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """The size and stride of each dimension."""
    return [(int(size), int(step)) for size, step in zip(tensor.shape, tensor.stride(), strict=True)]


def _check_pair(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    if not (is_trained(tensor) or is_trained(other)) or not torch.isin(_places(tensor), _places(other)).any():
        return
    raise UsageError(
        f"'{name}' and '{other_name}' share memory (tied through .data, or views of one buffer), but the run would "
        "train them as two tensors",
        fix="tie them as one parameter before session.optimizer(): decoder.weight = encoder.weight; or give each its "
        "own memory: tensor.data = tensor.data.clone()",
    )


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """The first byte of each element, counted from the begin of its storage."""
    found = torch.tensor(tensor.storage_offset(), device="cpu")
    for size, step in _strides(tensor):
        found = found.unsqueeze(-1) + torch.arange(size, device="cpu") * step
    return found * tensor.itemsize
