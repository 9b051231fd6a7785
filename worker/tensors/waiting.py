"""Tensors that are waited for by whatever reads them.

Until a tensor is whole its class is one of those here, so torch asks `__torch_function__` before it does anything with
it, wherever it was got from. What cannot be seen so is a read through other memory, an alias of the tensor (`p.data`,
a state dict, a NumPy array that is kept), which shows in the number of its storage's users (`num_users`); and code
that is compiled or scripted (`hidden`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.abc import MetaPathFinder
from typing import Any

import torch
from torch import nn

_late: dict[int, Callable[[], None]] = {}  # by id of a tensor that has not come: what waits for it

_PROPERTIES = (
    "grad", "requires_grad", "is_leaf", "grad_fn", "shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu",
    "is_sparse", "is_meta", "is_quantized", "is_nested", "is_mps", "is_xpu", "names", "_version", "_backward_hooks",
    "itemsize", "nbytes",
)  # fmt: skip
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_contiguous", "storage_offset",
    "is_floating_point", "is_complex", "is_signed", "get_device", "requires_grad_", "register_hook",
    "register_post_accumulate_grad_hook", "retain_grad", "__hash__", "__len__",
)  # fmt: skip
_accessors = [getattr(torch.Tensor, name) for name in _PROPERTIES if hasattr(torch.Tensor, name)]
# What asks for nothing that an arrival changes; `zero_grad()` does before every forward pass.
_READS_NOTHING = frozenset(
    [getattr(one, how) for one in _accessors for how in ("__get__", "__set__", "__delete__") if hasattr(one, how)]
    + [getattr(torch.Tensor, name) for name in _METHODS]
)


class _Waits:
    """Of a tensor that has not come."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS_NOTHING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if not _wait_for_all((*args, *kwargs.values())):
            for come in list(_late.values()):  # in something that is not looked into
                come()
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _wait_for_all([self])
        return self.__deepcopy__(memo)  # of the class that it has now

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait_for_all([self])
        return self.__reduce_ex__(protocol)


class WaitingParameter(_Waits, nn.Parameter):
    """A parameter meanwhile."""


class WaitingTensor(_Waits, torch.Tensor):
    """A buffer meanwhile."""


MAY_WAIT: dict[type, type] = {nn.Parameter: WaitingParameter, torch.Tensor: WaitingTensor}
_USUAL = {waiting: usual for usual, waiting in MAY_WAIT.items()}


def _wait_for_all(found: Iterable[Any]) -> bool:
    """True where there was any."""
    was_any = False
    for one in found:
        if isinstance(one, _Waits):
            was_any = True
            come = _late.get(id(one))
            if come is not None:
                come()
        elif isinstance(one, list | tuple):
            was_any |= _wait_for_all(one)
        elif isinstance(one, dict):
            was_any |= _wait_for_all(one.values())
    return was_any


def lacking() -> str:
    """What of torch's own, which it promises nobody, is not there or is another; empty where all of this works."""
    tensor = torch.empty(1)
    try:
        if num_users(tensor) - num_users(tensor.detach()) != -1:
            return "a count of a storage's users"
        with torch._C._DisableFuncTorch(), torch._C.DisableTorchFunctionSubclass():
            make_wait(tensor, lambda: None)
    except (AttributeError, TypeError, RuntimeError) as error:
        return str(error)
    finally:
        make_usual(tensor)
    return ""


def num_users(tensor: torch.Tensor) -> int:
    """Tensors that share its memory, it and one more included."""
    count: Any = torch._C._storage_Use_Count
    return int(count(tensor.untyped_storage()._cdata))


def make_wait(tensor: torch.Tensor, come: Callable[[], None]) -> None:
    """Whoever reads it calls `come` first, which makes it usual again. It is of a class in MAY_WAIT."""
    _late[id(tensor)] = come
    tensor.__class__ = MAY_WAIT.get(type(tensor), type(tensor))


def make_usual(tensor: torch.Tensor) -> None:
    tensor.__class__ = _USUAL.get(type(tensor), type(tensor))
    _late.pop(id(tensor), None)


_COMPILED = "something is compiled (torch.compile)"


class BeforeCompiling(MetaPathFinder):
    """Calls `settle` before torch compiles anything, which would look into what is here instead of calling it."""

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = settle
        self._is_told = self._has_begun = False
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Torch loads its compiler when it is needed for the first time."""
        if name == "torch._dynamo":
            self._settle()

    def why_not(self) -> str:
        """Why reads are not seen, or might not be; empty while nothing is compiled."""
        compiler = sys.modules.get("torch._dynamo")
        if compiler is not None and not self._is_told:
            ask = getattr(sys.modules.get("torch._dynamo.callback"), "on_compile_start", None)
            if ask is None:
                return "this torch does not say when it compiles"
            ask(self._begins)
            self._is_told = True
        return _COMPILED if self._has_begun else ""

    def _begins(self, _: Any) -> None:
        self._has_begun = True
        self._settle()

    def end(self) -> None:
        """No more."""
        self._settle = lambda: None
        sys.meta_path.remove(self)


def hidden(model: nn.Module) -> str:
    """Why reads of a model's parameters cannot be seen; empty when they can."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return f"'{name}' is scripted"
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            return "the model is compiled"
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    if counters.get("frames", {}).get("total") or counters.get("stats", {}).get("unique_graphs"):  # the whole graph
        return _COMPILED
    return ""
