"""Local steps that go on while their difference is exchanged, and how they are put together with what comes of it.

Of what was measured, the weights S at that moment are kept; when the server's new weights N come, some steps later, the
model's L become

    shift   N + (L - S)                    the steps since then stay (LOSCAR-SGD; CoCoD-SGD, arXiv:1906.12043)
    blend   alpha L + (1 - alpha) N        Streaming DiLoCo, arXiv:2501.18512, section 2.3

and what is measured next is the difference to N: in blend the rest of L is sent again. Parameters that were not
measured, of another fragment, go on as they are; where a round went by without this worker, its steps are put on what
the others have made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress, count
from typing import NamedTuple

import torch

from .anchor import Anchor
from .fragments import Division
from .transfer import ModelTensors

# Changes L in place, given S, N and alpha.
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]


def _shift(now: torch.Tensor, measured: torch.Tensor, new: torch.Tensor, alpha: float) -> None:
    now.sub_(measured).add_(new)


def _blend(now: torch.Tensor, measured: torch.Tensor, new: torch.Tensor, alpha: float) -> None:
    now.lerp_(new, 1 - alpha)


RULES: dict[str, Rule] = {"shift": _shift, "blend": _blend}


class Merge(NamedTuple):
    """`rule` is one of RULES; `after_steps`: local steps from what was measured on, 0: up to the next contribution."""

    rule: str = "shift"
    alpha: float = 0.0
    after_steps: int = 0


class Overlap(Anchor):
    """An anchor of a model whose steps go on. Where deltas are handed over, `measure`, then copy what is sent, then
    `depart`; `merge` what has come of it. Used on the training thread, with a copy of the parameters besides."""

    def __init__(self, model: ModelTensors, num_fragments: int, merge: Merge) -> None:
        super().__init__(model)
        self._rule, self._alpha = RULES[merge.rule], merge.alpha
        self._division = Division(model.layout, num_fragments)
        self.choose = self._division.choose
        self._indices = list(compress(count(), self._is_trained))
        self._aside: list[torch.Tensor] = []  # what the model holds, while it shows what the server has

    def measure(self) -> None:
        chosen = [at for at in range(len(self._held)) if self._division.has(at)]
        pairs = list(self._pairs())
        for at in chosen:
            held, now = pairs[at]
            held.sub_(now)
        self._model.deltas = {self._indices[at]: self._held[at] for at in chosen}

    def depart(self) -> None:
        """What was measured has been copied: the model as it was then is kept in its place."""
        for at, (held, now) in enumerate(self._pairs()):
            if self._division.has(at):
                held.copy_(now)

    def merge(self, received: Sequence[torch.Tensor]) -> None:
        """`received` are all parameters as the server has them now; the model goes on from these."""
        for at, (held, now) in enumerate(self._pairs()):
            new = received[self._indices[at]].to(now.device)
            if self._division.has(at):
                self._rule(now, held, new, self._alpha)
            elif not torch.equal(held, new):
                _shift(now, held, new, self._alpha)
            held.copy_(new)

    def show(self, received: Sequence[torch.Tensor]) -> None:
        """The model has these weights, the server's, until it is hidden again."""
        self._aside = [tensor.detach().clone() for tensor in self._model.tensors[: self._model.num_exchanged]]
        for tensor, new in zip(self._model.tensors, received[: len(self._aside)], strict=False):
            tensor.detach().copy_(new)

    def hide(self) -> None:
        for tensor, own in zip(self._model.tensors, self._aside, strict=False):
            tensor.detach().copy_(own)
        self._aside = []

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for held, now in zip(self._held, self._trained, strict=True):
            if held.device != now.device:  # the model was moved
                held.data = held.to(now.device)
            yield held, now
