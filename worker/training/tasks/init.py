"""Initial weights from a file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from ....common.errors import UsageError
from ...tensors.transfer import named_tensors

_SHOWN = 3  # names of each kind of difference that a message lists
_FIX = "give the file that belongs to this model (--init), or leave it out"


def load_weights(
    model: nn.Module, path: str, flag: str = "--init ", write: Callable[[str, torch.Tensor], None] | None = None
) -> None:
    """Copy the tensors of a safetensors file into the model; or give them to `write`, with the model's dtypes.

    Dtypes may differ, but names and shapes must match. Name prefixes of torch.compile and DistributedDataParallel are
    ignored. Raises UsageError with the differences.
    """
    from safetensors.torch import load_file

    with _named(path, flag):
        found = {name.replace("_orig_mod.", ""): tensor for name, tensor in load_file(path).items()}
    tensors = named_tensors(model)
    if not any(name.startswith("module.") for name in tensors):
        found = {name.removeprefix("module."): tensor for name, tensor in found.items()}
    loaded = {id(tensors[name]) for name in found if name in tensors}  # a file may have only one name of tied weights
    shapes = [
        f"'{name}' is {list(found[name].shape)} there and {list(tensor.shape)} here"
        for name, tensor in tensors.items()
        if name in found and found[name].shape != tensor.shape
    ]
    wrong = [
        *_listed("it lacks", [repr(name) for name, tensor in tensors.items() if id(tensor) not in loaded]),
        *_listed("the model has no", [repr(name) for name in found if name not in tensors]),
        *_listed("", shapes),
    ]
    if wrong:
        message = f"{flag}{path} does not fit the model: {'; '.join(wrong)}"
        raise UsageError(message, fix=_FIX if flag else "give the task that the weights are of, with its task.args")
    with torch.no_grad():
        for name, tensor in found.items():
            if write is None:
                tensors[name].copy_(tensor)
            else:
                write(name, tensor.to(tensors[name].dtype))


def read_tensors(path: str, shapes: Mapping[str, torch.Size], wanted: Collection[str]) -> dict[str, torch.Tensor]:
    """The `wanted` tensors of a safetensors file, which must have those of `shapes`. Other tensors are not read.

    Raises UsageError with the differences.
    """
    from safetensors import safe_open

    with _named(path, "--init "), safe_open(path, "pt") as file:
        known = set(file.keys())
        lacking = [repr(name) for name in shapes if name not in known]
        other = [
            repr(name)
            for name, shape in shapes.items()
            if name in known and file.get_slice(name).get_shape() != list(shape)
        ]
        if wrong := [*_listed("it lacks", lacking), *_listed("of another shape:", other)]:
            raise UsageError(f"--init {path} does not fit the model: {'; '.join(wrong)}", fix=_FIX)
        return {name: file.get_tensor(name).clone() for name in wanted}  # else they would be views of the mapped file


def check_file(path: str, flag: str) -> None:
    """Raise UsageError if this is no readable safetensors file. Reads only its header."""
    from safetensors import safe_open

    with _named(path, flag), safe_open(path, "pt"):
        pass


@contextmanager
def _named(path: str, flag: str) -> Iterator[None]:
    """Turn the errors of a safetensors file into UsageErrors that name the flag and the file."""
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        why = error.strerror or "there is no such file"
        fix = "put the file where every worker can read it" if flag else "give a file that --save has written"
        raise UsageError(f"{flag}{path}: cannot be read: {why}", fix=fix) from None
    except SafetensorError as error:
        message = f"{flag}{path}: is no safetensors file: {error}"
        raise UsageError(message, fix="give a file that --save has written") from None


def _listed(problem: str, names: list[str]) -> list[str]:
    """The problem and its names as one phrase in a list; an empty list without names."""
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{problem} {', '.join(names[:_SHOWN])}{rest}".strip()] if names else []
