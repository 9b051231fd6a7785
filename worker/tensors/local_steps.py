"""Measures local steps as deltas, and adds them to the server's new weights.

When a delta is measured, the weights S of that moment are kept. The server's new weights N arrive some steps later.
Then the model's weights L become N + (L - S), which keeps the steps since then (LOSCAR-SGD; CoCoD-SGD,
arXiv:1906.12043). The next delta is the difference to N. With `policy.fragments` a delta has one fragment of the
parameters (Streaming DiLoCo), and the others continue from their own steps. If a round passed without this worker, its
steps are added to the new weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import compress

import torch

from ...common.errors import UsageError
from ...common.tensors.layout import Entry
from .transfer import ModelTensors


class Anchor:
    """A copy of a model's parameters as they arrived. Used on the training thread.

    While a contribution is exchanged, the same memory holds the delta: anchor - weights. The delta points downhill, as
    a gradient does. The opposite sign would climb (torchft#233).
    """

    def __init__(self, model: ModelTensors) -> None:
        self._model = model
        self._anchors = [tensor.detach().clone() for tensor in model.tensors[: model.num_trained]]
        model.deltas = dict(enumerate(self._anchors))
        self._chosen = [True] * len(self._anchors)  # whether each parameter is in the newest delta

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each anchor with its parameter, which may have moved to another device."""
        for anchor, tensor in zip(self._anchors, self._model.tensors, strict=False):
            now = tensor.detach()
            if anchor.device != now.device:
                anchor.data = anchor.to(now.device)
            yield anchor, now

    def measure(self) -> None:
        """Turn the anchor into the delta of the local steps."""
        for anchor, now in compress(self._pairs(), self._chosen):
            anchor.sub_(now)

    def note(self) -> None:
        """New weights arrived: copy them, because the next local steps begin from them."""
        for anchor, now in self._pairs():
            anchor.copy_(now)


class Overlap(Anchor):
    """An anchor for a model that keeps training during the exchange. Used on the training thread.

    Call `measure`, copy the deltas, then call `depart`. Call `merge` when new weights arrive.
    """

    def __init__(self, model: ModelTensors, num_fragments: int) -> None:
        super().__init__(model)
        self._fragments = fragments_of(model.layout.entries[: model.num_trained], num_fragments)

    def choose(self, fragment: int | None) -> tuple[int, ...]:
        """Select this fragment for the next delta; None selects all parameters.

        Returns the positions of the other parameters in the layout's specs.
        """
        self._chosen = [fragment is None or other == fragment for other in self._fragments]
        return tuple(compress(self._model.positions, [not is_chosen for is_chosen in self._chosen]))

    def measure(self) -> None:
        super().measure()
        self._model.deltas = dict(compress(enumerate(self._anchors), self._chosen))

    def depart(self) -> None:
        """The deltas have been copied: overwrite them with the weights of that moment."""
        for anchor, now in compress(self._pairs(), self._chosen):
            anchor.copy_(now)

    def merge(self, received: Sequence[torch.Tensor]) -> None:
        """Merge the server's tensors `received`, in the order of the model's, into the model's parameters."""
        for tensor, is_chosen, (anchor, now) in zip(received, self._chosen, self._pairs(), strict=False):
            new = tensor.to(now.device)
            if is_chosen or not torch.equal(anchor, new):
                now.sub_(anchor).add_(new)  # the new weights plus the steps since they were measured
            anchor.copy_(new)


_LAYER = re.compile(r".*?\.\d+(?=\.)|\d+(?=\.)")  # matches the layer in a parameter's name, such as blocks.3


def fragments_of(parameters: Sequence[Entry], num: int) -> list[int]:
    """Return the fragment of each parameter, 0 to `num` - 1.

    Parameters of one layer get the same fragment. The largest layers come first, each in the smallest fragment, so
    equal layers alternate and embeddings are spread. Raises UsageError if there are fewer parameters than fragments.
    """
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
