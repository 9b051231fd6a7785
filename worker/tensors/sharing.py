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
        if tensor.device.type == "meta" or is_divided(tensor) or not tensor.numel():
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
                first, second = tensors[name], tensors[other]
                if (is_trained(first) or is_trained(second)) and torch.isin(_places(first), _places(second)).any():
                    raise UsageError(
                        f"'{name}' and '{other}' share memory (tied through .data, or views of one buffer), but the "
                        "run would train them as two tensors",
                        fix="tie them as one parameter before session.optimizer(): decoder.weight = encoder.weight; or "
                        "give each its own memory: tensor.data = tensor.data.clone()",
                    )


def is_divided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is sharded over processes. It does not import DTensor, which takes 0.8 s."""
    return type(tensor).__name__ == "DTensor"


def is_trained(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _strides(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """The size and stride of each dimension."""
    return [(int(size), int(step)) for size, step in zip(tensor.shape, tensor.stride(), strict=True)]


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """The first byte of each element, counted from the begin of its storage."""
    found = torch.tensor(tensor.storage_offset(), device="cpu")
    for size, step in _strides(tensor):
        found = found.unsqueeze(-1) + torch.arange(size, device="cpu") * step
    return found * tensor.itemsize
