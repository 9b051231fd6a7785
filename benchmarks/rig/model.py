"""A model of a given size with tensors as a real one has them, and gradients without a loss."""

from __future__ import annotations

import math

import torch
from torch import nn

# Above this many floats the tensors are those of transformer blocks, below those of two layers.
_BLOCKS_FROM = 200_000
_NUM_BLOCKS = 4


def synthetic_model(num_floats: int) -> nn.ParameterList:
    """Exactly `num_floats` float32 in matrices and vectors of realistic proportions; the same on every call."""
    shapes = _block_shapes(num_floats) if num_floats >= _BLOCKS_FROM else _two_layers(num_floats)
    left = num_floats
    parameters = nn.ParameterList()
    generator = torch.Generator().manual_seed(0)
    while left:
        for shape in shapes:
            if not left:
                break
            if math.prod(shape) > left:
                shape = (left,)
            parameters.append(nn.Parameter(torch.randn(shape, generator=generator) * 0.02))
            left -= math.prod(shape)
    return parameters


def fill_gradients(model: nn.Module) -> None:
    """Give every parameter a small and finite gradient, as `backward()` would."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3


def _block_shapes(num_floats: int) -> list[tuple[int, ...]]:
    """One transformer block of width d, 12 d² + 13 d floats; d such that about four to sixteen make the model."""
    d = 2 ** int(math.log2(math.sqrt(num_floats / (12 * _NUM_BLOCKS))))
    attention: list[tuple[int, ...]] = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,)]
    return [*attention, (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]


def _two_layers(num_floats: int) -> list[tuple[int, ...]]:
    """Eight inputs, h hidden units, two outputs: 11 h + 2 floats; what is over makes one more vector."""
    h = max(1, (num_floats - 2) // 11)
    return [(h, 8), (h,), (2, h), (2,)]
