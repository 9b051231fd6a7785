"""Converts a `state_dict()` to bytes and back: safetensors, with other values as JSON in the metadata.

Reading it cannot run code, because it does not use pickle.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ...common.errors import UsageError
from ...common.wire.json_text import read_json

_TREE = "state"  # key in the metadata
_LENGTH_BYTES = 8  # length field of the file's header
# Dicts of these classes keep their class; "$" marks values that are no plain dict or list.
_KINDS: dict[str, Callable[[Any], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter[Any]}


def pack(values: Mapping[str, Any]) -> bytes:
    """Convert values to bytes. Raises UsageError, with the name, for a value that is neither a tensor nor JSON."""
    tree, tensors = take_apart(values)
    try:
        return save(tensors, {_TREE: json.dumps(tree, separators=(",", ":"))})
    except (SafetensorError, KeyError, ValueError) as error:  # a dtype that safetensors does not have
        raise _refused(", ".join(values), f"not writable as safetensors ({error})") from None


def take_apart(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Split values into JSON and the tensors that it names. Raises UsageError as `pack` does.

    The tensors are contiguous and on the host. They are copied only if necessary.
    """
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()

    def take(value: Any, where: str) -> Any:
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int | float | np.number):
            return value.item() if isinstance(value, np.number) else value
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            name = str(len(tensors))
            # On the host, contiguous and with a storage of its own.
            tensor = value.detach().cpu()
            is_alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
            if not is_alone or tensor.data_ptr() in seen:
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            seen.add(tensor.data_ptr())
            tensors[name] = tensor
            return {"$tensor": name}
        if isinstance(value, tuple):
            return {"$tuple": [take(item, f"{where}[{index}]") for index, item in enumerate(value)]}
        if type(value) is list:
            return [take(item, f"{where}[{index}]") for index, item in enumerate(value)]
        if type(value).__name__ in _KINDS and isinstance(value, dict):
            if type(value) is dict and all(type(key) is str and key[:1] != "$" for key in value):
                return {key: take(item, f"{where}.{key}") for key, item in value.items()}
            items = [[take(key, where), take(item, f"{where}[{key!r}]")] for key, item in value.items()]
            return {"$" + type(value).__name__: items}
        raise _refused(where, f"of type {type(value).__name__}")

    return {name: take(value, name) for name, value in values.items()}, tensors


def _refused(where: str, problem: str) -> UsageError:
    return UsageError(
        f"session.state(): '{where}' is {problem}, and only tensors and JSON travel (numbers, text, lists, dicts)",
        fix="give session.state() an object whose state_dict() holds only these",
    )


def unpack(payload: bytes) -> dict[str, Any]:
    """Convert bytes back to values, with tensors on the CPU. Raises UsageError for other bytes."""
    try:
        end = _LENGTH_BYTES + int.from_bytes(payload[:_LENGTH_BYTES], "little")
        tree = read_json(read_json(payload[_LENGTH_BYTES:end])["__metadata__"][_TREE], nan=True, big=True)
        tensors = load(payload)
        return put_together(tree, tensors)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"the state that the server kept cannot be read: {type(error).__name__}: {error}") from None


def put_together(tree: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Rebuild the values that `take_apart` has split."""
    return {name: _give(value, tensors) for name, value in tree.items()}


def _give(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_give(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((mark, content),) = value.items()
        if mark == "$tensor":
            return tensors[content]
        if mark == "$tuple":
            return tuple(_give(number, tensors) for number in content)
        if mark[:1] == "$":
            return _KINDS[mark[1:]]({_give(key, tensors): _give(item, tensors) for key, item in content})
    return {key: _give(item, tensors) for key, item in value.items()}
