"""Gradients scaled to a norm, as torch.nn.utils.clip_grad_norm_ does it, where they lie in no `.grad`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import UsageError

_EPSILON = 1e-6  # torch's


def check_max_norm(max_norm: float) -> None:
    """UsageError for what is no bound. Infinity is one that always holds."""
    if not max_norm > 0:  # NaN is not
        raise UsageError(f"clip_grad_norm({max_norm}): a norm is larger than 0", fix="such as clip_grad_norm(1.0)")


def clip(gradients: Sequence[torch.Tensor], max_norm: float) -> None:
    """In place: together they have a 2-norm of at most `max_norm`. They may lie on several devices."""
    if not gradients:
        return
    norms = [
        torch.linalg.vector_norm(gradient.to_dense() if gradient.is_sparse else gradient) for gradient in gradients
    ]
    norm = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    factor = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    for item in gradients:
        item.mul_(factor.to(item.device))
