"""Which modules use which tensors of a model, and in what order, as is seen while weights come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from ...common.tensors.layout import Kind
from ..tensors.transfer import ModelTensors


class Usage:
    """Before a module's forward pass `come` is called with the index of each tensor that it owns."""

    def __init__(self, model: ModelTensors, come: Callable[[int], None]) -> None:
        self._come = come
        self._owners = _owners(model)
        self._kinds = [entry.spec.kind for entry in model.layout.entries[: model.num_exchanged]]
        # All modules': one of a module's own would be copied and saved with it.
        self._hook: RemovableHandle | None = None
        self._used: list[int] | None = None  # in this step, once there was a forward pass
        self.order: tuple[int, ...] = ()  # of all tensors; empty until it is known

    def look(self) -> None:
        """From now on."""
        self._used = None
        self._hook = register_module_forward_pre_hook(self._before)

    def _before(self, module: nn.Module, _: Any) -> None:
        """The forward pass of any module."""
        if self._used is None:
            self._used = []
        for index in self._owners.get(module, ()):
            self._come(index)

    def used(self, index: int) -> None:
        """A tensor is read. What is read before a forward pass (`state_dict()`) says nothing."""
        if self._used is not None:
            self._used.append(index)

    def look_away(self, was_whole: bool) -> None:
        """A step is over, of which all was seen. The buffers are few, and early layers': these come first; what
        nobody used comes last."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if was_whole and self._used and not self.order:
            all_ = range(len(self._kinds))
            buffers = [index for index in all_ if self._kinds[index] is Kind.BUFFER]
            self.order = tuple(dict.fromkeys([*buffers, *self._used, *all_]))


def _owners(model: ModelTensors) -> dict[nn.Module, list[int]]:
    """Of each module that has any, the exchanged tensors it holds itself."""
    index_of = {id(tensor): index for index, tensor in enumerate(model.tensors[: model.num_exchanged])}
    found: dict[nn.Module, list[int]] = {}
    for module in model.module.modules():
        held = (*module._parameters.values(), *module._buffers.values())
        if indices := [index_of[id(one)] for one in held if id(one) in index_of]:
            found[module] = indices
    return found
