"""Clips gradients to a norm, as torch.nn.utils.clip_grad_norm_ does, but without `.grad` attributes."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import torch

from ..errors import UsageError

_EPSILON = 1e-6  # torch's


def check_max_norm(max_norm: float) -> None:
    """Raise UsageError unless `max_norm` is positive. Infinity is allowed, and never clips."""
    if not isinstance(max_norm, Real | torch.Tensor) or not max_norm > 0:  # also refuses NaN
        raise UsageError(f"clip_grad_norm({max_norm!r}): the norm must be above 0", fix="such as clip_grad_norm(1.0)")


def clip(gradients: Sequence[torch.Tensor], max_norm: float) -> None:
    """Scale gradients in place so that their joint 2-norm is at most `max_norm`. They may be on several devices."""
    if not gradients:
        return
    norms = [
        torch.linalg.vector_norm(gradient.to_dense() if gradient.is_sparse else gradient) for gradient in gradients
    ]
    scale(gradients, torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms])), max_norm)


def scale(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients in place, which are of a gradient with this 2-norm, so that it is at most `max_norm`."""
    factor = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    for item in gradients:
        item.mul_(factor.to(item.device))
