"""How far local steps go, and how they are merged with the weights that come back.

When a delta is measured, the weights S at that moment are kept. When the server's new weights N come, some steps later,
the model's weights L become

    shift   N + (L - S)                    the steps since then stay (LOSCAR-SGD; CoCoD-SGD, arXiv:1906.12043)
    blend   alpha L + (1 - alpha) N        Streaming DiLoCo, arXiv:2501.18512, section 2.3

and the next delta is the difference to N: in blend the rest of L is sent again. With `policy.fragments` a delta has one
fragment of the parameters (Streaming DiLoCo). The others go on from their own steps. Where a round passed without this
worker, its steps are added to the new weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import NamedTuple

import torch

from ...common.errors import UsageError
from ...common.tensors.layout import Entry, Kind
from .transfer import ModelTensors

# Changes L in place, given S, N and alpha.
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]


def _shift(now: torch.Tensor, measured: torch.Tensor, new: torch.Tensor, alpha: float) -> None:
    now.sub_(measured).add_(new)


def _blend(now: torch.Tensor, measured: torch.Tensor, new: torch.Tensor, alpha: float) -> None:
    now.lerp_(new, 1 - alpha)


RULES: dict[str, Rule] = {"shift": _shift, "blend": _blend}


class Merge(NamedTuple):
    """`rule` is one of RULES; `after_steps`: local steps since the measurement, 0: up to the next contribution."""

    rule: str = "shift"
    alpha: float = 0.0
    after_steps: int = 0


class Anchor:
    """A copy of a model's parameters as they came; while a contribution is exchanged, the difference to what they have
    become, in the same memory: anchor - weights, which points downhill as a gradient does (the other way round it
    climbs, torchft#233). Used on the training thread."""

    def __init__(self, model: ModelTensors) -> None:
        self._model = model
        entries = enumerate(model.layout.entries)
        self._indices = [index for index, entry in entries if entry.spec.kind is Kind.PARAMETER]
        self._anchors = [model.tensors[index].detach().clone() for index in self._indices]
        model.deltas = dict(zip(self._indices, self._anchors, strict=True))

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each anchor with its parameter, which may have moved to another device."""
        for index, anchor in zip(self._indices, self._anchors, strict=True):
            now = self._model.tensors[index].detach()
            if anchor.device != now.device:
                anchor.data = anchor.to(now.device)
            yield anchor, now

    def measure(self) -> None:
        """The local steps are taken: the anchor becomes the difference."""
        for anchor, now in self._pairs():
            anchor.sub_(now)

    def note(self) -> None:
        """Weights have come: the next steps begin from these."""
        for anchor, now in self._pairs():
            anchor.copy_(now)


class Overlap(Anchor):
    """An anchor of a model whose steps go on. `measure` the deltas, then copy them, then `depart`; `merge` the weights
    that come. Used on the training thread."""

    def __init__(self, model: ModelTensors, num_fragments: int, merge: Merge) -> None:
        super().__init__(model)
        self._rule, self._alpha = RULES[merge.rule], merge.alpha
        entries = [model.layout.entries[index] for index in self._indices]
        self._fragments = fragments_of(entries, num_fragments)
        positions = {spec.name: position for position, spec in enumerate(model.layout.specs)}
        self._positions = [positions[entry.spec.name] for entry in entries]
        self._chosen = [True] * len(entries)  # parameters of the newest delta
        self._aside: list[torch.Tensor] = []  # the model's tensors, while it shows the server's weights

    def choose(self, fragment: int | None) -> tuple[int, ...]:
        """The next delta has this fragment, or all. Returns the positions in the layout's specs of the others."""
        self._chosen = [fragment is None or other == fragment for other in self._fragments]
        return tuple(compress(self._positions, [not is_chosen for is_chosen in self._chosen]))

    def measure(self) -> None:
        for anchor, now in compress(list(self._pairs()), self._chosen):
            anchor.sub_(now)
        self._model.deltas = dict(compress(zip(self._indices, self._anchors, strict=True), self._chosen))

    def depart(self) -> None:
        """The deltas have been copied: keep the weights of that moment in their place."""
        for anchor, now in compress(list(self._pairs()), self._chosen):
            anchor.copy_(now)

    def merge(self, received: Sequence[torch.Tensor]) -> None:
        """`received` are the server's tensors, in the order of the model's; the model goes on from its parameters."""
        for index, is_chosen, (anchor, now) in zip(self._indices, self._chosen, self._pairs(), strict=True):
            new = received[index].to(now.device)
            if is_chosen:
                self._rule(now, anchor, new, self._alpha)
            elif not torch.equal(anchor, new):
                _shift(now, anchor, new, self._alpha)
            anchor.copy_(new)

    def show(self, received: Sequence[torch.Tensor]) -> None:
        """Show these weights, the server's, in the model until `hide`."""
        self._aside = [tensor.detach().clone() for tensor in self._model.tensors[: self._model.num_exchanged]]
        for tensor, new in zip(self._model.tensors, received[: len(self._aside)], strict=False):
            tensor.detach().copy_(new)

    def hide(self) -> None:
        for tensor, saved in zip(self._model.tensors, self._aside, strict=False):
            tensor.detach().copy_(saved)
        self._aside = []


_LAYER = re.compile(r".*?\.\d+(?=\.)|\d+(?=\.)")  # of a parameter's name, such as blocks.3


def fragments_of(parameters: Sequence[Entry], num: int) -> list[int]:
    """The fragment of each parameter, 0 to `num` - 1. A layer stays in one piece. The largest layers come first, each
    to the smallest fragment, so that equal layers are dealt out in turn and embeddings lie apart. Raises UsageError
    where there are too few parameters."""
    names = [entry.spec.name for entry in parameters]
    found = [_LAYER.match(name) for name in names]
    keys = [item.group() if item else name.rpartition(".")[0] for item, name in zip(found, names, strict=True)]
    if len(set(keys)) < num:
        keys = names
    if len(names) < num:
        raise UsageError(
            f"policy.fragments is {num}, and the model has {len(names)} parameter tensors to be divided among them",
            fix=f"--fragments {len(names)} or fewer",
        )
    sizes: dict[str, int] = {}
    for key, entry in zip(keys, parameters, strict=True):
        sizes[key] = sizes.get(key, 0) + entry.num_bytes
    loads, of_key = [(0, 0)] * num, dict[str, int]()  # bytes, and number of layers
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        least = min(range(num), key=loads.__getitem__)
        loads[least] = loads[least][0] + sizes[key], loads[least][1] + 1
        of_key[key] = least
    return [of_key[key] for key in keys]
