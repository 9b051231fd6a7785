"""The weights that each worker was given, kept so that its gradient, which comes late, can be moved to those of now.

DC-ASGD (Zheng et al., ICML 2017): a gradient changes with the weights by the Hessian, for which the diagonal of g g^T
may stand. So it is, for a gradient g of the weights `then` where they are `now`

    constant    g + lambda g g (now - then)
    adaptive    the same with lambda / sqrt(ms + 1e-7) for lambda, ms <- 0.95 ms + 0.05 g g, of all workers' gradients

all element by element, so that shards need nothing from one another. Used on the tensor thread, whose order is that of
the decisions: a copy made when a reply is decided is of just the version that is held for it.
"""

from __future__ import annotations

from collections import deque

import torch

from ....common.tensors.layout import Kind, View
from ...policies.shared.late import Compensation
from ..windows import Window

_DECAY, _EPSILON = 0.95, 1e-7


class Delivered:
    """Of each rank the newest `num_kept` versions that it was given: two where it computes while an exchange is in
    flight, whose reply it has not used yet."""

    def __init__(self, rule: Compensation, windows: list[Window], view: View, num_kept: int) -> None:
        self._rule, self._windows, self._view, self._num_kept = rule, windows, view, num_kept
        self._of_rank: dict[int, deque[tuple[int, torch.Tensor]]] = {}
        self._squares: torch.Tensor | None = None  # ms, as a payload

    def note(self, rank: int, version: int, weights: torch.Tensor) -> None:
        """The rank is given these, uint8 [total_bytes]."""
        kept = self._of_rank.setdefault(rank, deque())
        num_bytes = self._windows[-1].end
        memory = kept.popleft()[1] if len(kept) == self._num_kept else torch.empty(num_bytes, dtype=torch.uint8)
        kept.append((version, memory.copy_(weights[:num_bytes])))

    def compensate(self, rank: int, version: int, payload: torch.Tensor, weights: torch.Tensor) -> bool:
        """Move the gradient in `payload`, uint8 [exchange_bytes], of the rank's weights of this version, to these
        weights.
        False when those are not here: it is as it came."""
        then = next((item for held, item in self._of_rank.get(rank, ()) if held == version), None)
        if then is None:
            return False
        is_adaptive = self._rule.kind == "adaptive"
        if is_adaptive and self._squares is None:
            self._squares = torch.zeros_like(then)
        view = self._view
        for window in self._windows:
            for piece in window.pieces:
                if piece.kind is not Kind.PARAMETER or not piece.is_float:
                    continue
                gradient = view(piece, payload)
                change = (view(piece, weights) - view(piece, then)).mul_(gradient).mul_(gradient)
                if is_adaptive and self._squares is not None:
                    squares = view(piece, self._squares)
                    squares.mul_(_DECAY).addcmul_(gradient, gradient, value=1 - _DECAY)
                    change.div_((squares + _EPSILON).sqrt_())
                gradient.add_(change, alpha=self._rule.strength)
        return True

    def drop(self, rank: int) -> None:
        self._of_rank.pop(rank, None)

    @property
    def num_bytes(self) -> int:
        """Held; asked from elsewhere while it is added to."""
        payloads = [payload for kept in list(self._of_rank.values()) for _, payload in list(kept)]
        return sum(payload.numel() for payload in payloads) + (
            self._squares.numel() if self._squares is not None else 0
        )
