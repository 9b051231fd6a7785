"""Delay compensation: keeps the weights that each worker received, to correct its late gradients.

DC-ASGD (Zheng et al., ICML 2017). The Hessian describes how a gradient changes with the weights, and the diagonal of
g g^T approximates it. So a gradient g, computed on the weights `then`, is corrected for the present weights `now`:

    constant    g + lambda g g (now - then)
    adaptive    the same with lambda / sqrt(ms + 1e-7) for lambda, ms <- 0.95 ms + 0.05 g g, of all workers' gradients

All operations are elementwise, so shards need nothing from each other. They run on the tensor thread, in the order of
the decisions. So a copy that is made when a reply is decided has exactly the version of that reply.
"""

from __future__ import annotations

from collections import deque

import torch

from ....common.tensors.layout import Kind, View
from ...policies.shared.late import Compensation
from ..windows import Window

_DECAY, _EPSILON = 0.95, 1e-7


class Delivered:
    """Keeps the newest `num_kept` versions that each rank received.

    With delayed updates it keeps two, because a worker computes while the newest reply is on its way.
    """

    def __init__(self, rule: Compensation, windows: list[Window], view: View, num_kept: int) -> None:
        self._rule, self._view, self._num_kept = rule, view, num_kept
        self._pieces = [piece for window in windows for piece in window.pieces if piece.kind is Kind.PARAMETER]
        self._num_bytes = windows[-1].end
        self._of_rank: dict[int, deque[tuple[int, torch.Tensor]]] = {}
        self._squares: torch.Tensor | None = None  # ms, in the layout of a payload

    def note(self, rank: int, version: int, weights: torch.Tensor) -> None:
        """Keep a copy of the weights that the rank receives, uint8 [total_bytes]."""
        versions = self._of_rank.setdefault(rank, deque())
        is_full = len(versions) == self._num_kept
        memory = versions.popleft()[1] if is_full else torch.empty(self._num_bytes, dtype=torch.uint8)
        versions.append((version, memory.copy_(weights[: self._num_bytes])))

    def compensate(self, rank: int, version: int, payload: torch.Tensor, weights: torch.Tensor) -> bool:
        """Correct the gradient in `payload`, uint8 [exchange_bytes], from the rank's weights of `version` to `weights`.

        Returns False, and leaves the gradient unchanged, if there is no copy of that version.
        """
        then = next((copy for known, copy in self._of_rank.get(rank, ()) if known == version), None)
        if then is None:
            return False
        if self._rule.kind == "adaptive" and self._squares is None:
            self._squares = torch.zeros_like(then)
        view = self._view
        for piece in self._pieces:
            if not piece.is_float:
                continue
            gradient = view(piece, payload)
            change = (view(piece, weights) - view(piece, then)).mul_(gradient).mul_(gradient)
            if self._squares is not None:
                squares = view(piece, self._squares)
                squares.mul_(_DECAY).addcmul_(gradient, gradient, value=1 - _DECAY)
                change.div_((squares + _EPSILON).sqrt_())
            gradient.add_(change, alpha=self._rule.strength)
        return True

    def drop(self, rank: int) -> None:
        """Drop the copies of a rank."""
        self._of_rank.pop(rank, None)

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies. Another thread may read this while copies are added."""
        copies = [copy for versions in list(self._of_rank.values()) for _, copy in list(versions)]
        return sum(copy.numel() for copy in (*copies, *([self._squares] if self._squares is not None else [])))
