"""Checks of files that a run reads: initial weights, and torch's list of optimizers."""

from __future__ import annotations

import ast
import os
import struct
from contextlib import suppress

from ...errors import UsageError, did_you_mean
from ...wire.json_text import read_json
from .machine import torch_folder

OUR_OPTIMIZERS = ("delayednesterov", "onebitadam")
_MOST_HEADER_BYTES = 100_000_000  # the limit of safetensors


def check_weights(path: str) -> None:
    """Raise UsageError for an --init file that is missing, or whose header is not a safetensors header."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
            header = file.read(length) if length <= min(size - 8, _MOST_HEADER_BYTES) else b""
    except OSError as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        fix = "copy the file to this path on every worker's machine"
        raise UsageError(f"--init {path}: cannot be read: {why}", fix=fix) from None
    why, num_bytes = "it does not begin with a header", size - 8 - length
    with suppress(ValueError, TypeError, KeyError, IndexError, AttributeError):
        tensors = read_json(header)
        ends = [int(tensor["data_offsets"][1]) for name, tensor in tensors.items() if name != "__metadata__"]
        if (end := max(ends, default=0)) == num_bytes:
            return
        why = f"its header declares {end:,} bytes of tensors; the file has {num_bytes:,}"
    raise UsageError(f"--init {path}: is no safetensors file: {why}", fix="name a file that --save has written")


def check_optimizer(name: str) -> None:
    """Raise UsageError for an optimizer that torch.optim does not have."""
    known = optimizer_names()
    if known and name.lower() not in known:
        raise UsageError(f"unknown optimizer '{name}'", fix=did_you_mean(name.lower(), known))


def optimizer_names() -> list[str]:
    """Return the optimizers of torch.optim and ours in lower case. The list is empty if torch's file is unreadable."""
    folder = torch_folder()
    try:
        tree = ast.parse((folder / "optim" / "__init__.py").read_bytes()) if folder is not None else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return []
    names = [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    classes = [name.lower() for name in names if name[:1].isupper() and name != "Optimizer"]
    return sorted({*classes, *OUR_OPTIMIZERS}) if classes and "*" not in names else []
