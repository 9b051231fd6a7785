"""Parameters that are exchanged a fragment at a time (policy.fragments; Streaming DiLoCo, arXiv:2501.18512)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from ...common.errors import UsageError
from ...common.tensors.layout import Entry, Kind, Layout
from .anchor import Anchor
from .transfer import ModelTensors

_LAYER = re.compile(r".*?\.\d+(?=\.)|\d+(?=\.)")  # of a parameter's name, such as blocks.3


def divided(parameters: Sequence[Entry], num: int) -> list[int]:
    """Of each parameter the fragment that it is in, 0 to `num` - 1. A layer stays in one piece; the largest come first,
    each to the fragment that has least, so that equal layers are dealt out in turn and embeddings lie apart. UsageError
    where there are too few."""
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
    loads, of_key = [(0, 0)] * num, dict[str, int]()  # bytes, and how many
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        least = min(range(num), key=loads.__getitem__)
        loads[least] = loads[least][0] + sizes[key], loads[least][1] + 1
        of_key[key] = least
    return [of_key[key] for key in keys]


class Division:
    """Which fragment each parameter is in, and which is exchanged next."""

    def __init__(self, layout: Layout, num: int) -> None:
        entries = [entry for entry in layout.entries if entry.spec.kind is Kind.PARAMETER]
        self.num = num
        self._of = divided(entries, num)
        places = {spec.name: place for place, spec in enumerate(layout.specs)}
        self._places = [places[entry.spec.name] for entry in entries]
        self._chosen: int | None = None

    def choose(self, fragment: int | None) -> tuple[int, ...]:
        """What is measured next: one of them, or all. Returns the positions in the layout's specs of what is not."""
        self._chosen = fragment
        return tuple(place for at, place in enumerate(self._places) if not self.has(at))

    def has(self, at: int) -> bool:
        """Whether this parameter is in what was chosen."""
        return self._chosen is None or self._of[at] == self._chosen


class Fragments(Anchor):
    """An anchor of which one fragment is measured and contributed at a time. The others' local steps go on: while an
    exchange lasts their weights lie aside, and the model holds what the server has, as far as it is known."""

    def __init__(self, model: ModelTensors, num: int) -> None:
        super().__init__(model)
        self._division = Division(model.layout, num)
        self.choose = self._division.choose
        self._indices = [index for index, is_trained in enumerate(self._is_trained) if is_trained]
        self._aside = [torch.empty_like(held) for held in self._held]  # differences, or weights that stay
        self._keeps = self._is_shown = False

    def measure(self) -> None:
        deltas = {}
        for at, (held, now) in enumerate(self._pairs()):
            if self._division.has(at):
                torch.sub(held, now, out=self._aside[at])
                deltas[self._indices[at]] = self._aside[at]
            else:
                self._aside[at].copy_(now)
            now.copy_(held)
        self._model.deltas = deltas

    def replied(self, counts: bool) -> None:
        """What was measured has been exchanged; unless it `counts`, nothing of before is kept."""
        self._keeps = counts

    def note(self) -> None:
        keeps, self._keeps, self._is_shown = self._keeps, False, False
        for at, (held, now) in enumerate(self._pairs()):
            if not keeps or self._division.has(at):
                held.copy_(now)
            elif torch.equal(held, now):
                now.copy_(self._aside[at])
            else:  # a round went by without this worker: its steps are put on what the others have made of it
                self._aside[at].sub_(held)
                held.copy_(now)
                now.add_(self._aside[at])
        self.choose(None)

    def show(self, is_shown: bool = True) -> None:
        """The model has the server's weights, as they came, until it is hidden again."""
        if is_shown == self._is_shown:
            return
        self._is_shown = is_shown
        for at, (held, now) in enumerate(self._pairs()):
            if is_shown:
                self._aside[at].copy_(now)
            now.copy_(held if is_shown else self._aside[at])

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = list(zip(self._held, self._trained, strict=True))
        for (held, now), aside in zip(pairs, self._aside, strict=True):
            if held.device != now.device:  # the model was moved
                held.data, aside.data = held.to(now.device), aside.to(now.device)
        return pairs
