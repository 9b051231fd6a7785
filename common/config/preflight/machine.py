"""Checks of this machine: its device, its addresses, the optimizers of its torch, and a file of initial weights."""

from __future__ import annotations

import ast
import errno
import glob
import os
import re
import socket
import struct
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from ...errors import BindError, UsageError, did_you_mean
from ...wire.json_text import read_json
from ..addresses import split_address

# Files of the drivers of NVIDIA (also on Jetson), AMD and WSL 2.
_DRIVERS = ("/dev/nvidia*", "/proc/driver/nvidia/gpus/*", "/dev/nvhost*", "/dev/nvmap", "/dev/kfd", "/dev/dxg")
# A process that was just killed may still have the port, until the kernel has ended it.
_WAIT_S, _AGAIN_S = 1.0, 0.05
OUR_OPTIMIZERS = ("delayednesterov", "onebitadam")
_MOST_HEADER_BYTES = 100_000_000  # the limit of safetensors


def check_device(name: str) -> None:
    """Raise UsageError if this machine cannot have the CUDA device. torch.cuda checks again once torch is loaded."""
    if not name.startswith("cuda"):
        return
    versions = re.findall(r"^(?:cuda|hip|rocm)\b[^=\n]*=\s*(.*)$", _torch_source("version.py"), re.MULTILINE)
    if versions and all(value.strip() == "None" for value in versions):
        why = "its torch is built without CUDA"
    elif os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        why = "CUDA_VISIBLE_DEVICES hides all"
    elif any(glob.glob(pattern) for pattern in _DRIVERS):
        return
    else:
        why = "there is no driver of a GPU"
    raise UsageError(f"--device {name}: this machine has 0 CUDA devices: {why}", fix="use --device auto or cpu")


def _torch_source(file: str) -> str:
    """Return the text of a file of torch, without importing torch. It is empty if the file cannot be read."""
    spec = find_spec("torch")
    with suppress(OSError, ValueError, TypeError):  # TypeError: torch is not installed, or is no package
        return (Path(spec.submodule_search_locations[0]) / file).read_text()  # type: ignore[union-attr, index]
    return ""


def check_listening(address: str, key: str) -> None:
    """Raise BindError if no process can listen at HOST:PORT, the value of the setting `key`."""
    host, port = split_address(address)
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        why = f"host {host!r} is not known here ({error.strerror})"
        fix = "name an address of this machine, such as 127.0.0.1"
        raise BindError(f"{key}: cannot listen on {address}: {why}", fix=fix) from None
    deadline = time.monotonic() + _WAIT_S
    while True:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
            try:
                probe.bind(where)
                return
            except OSError as error:
                why, fix = str(error.strerror), "name an address of this machine"
                if error.errno == errno.EADDRINUSE:
                    why = f"port {port} is in use on this machine"
                    fix = "stop the other process, or choose another port (0 takes a free one)"
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise BindError(f"{key}: cannot listen on {address}: {why}", fix=fix) from None
        time.sleep(_AGAIN_S)


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
    if (known := optimizer_names()) and name.lower() not in known:
        raise UsageError(f"unknown optimizer '{name}'", fix=did_you_mean(name.lower(), known))


def optimizer_names() -> list[str]:
    """Return the optimizers of torch.optim and ours in lower case. The list is empty if torch's file is unreadable."""
    try:
        tree = ast.parse(_torch_source("optim/__init__.py"))
    except (SyntaxError, ValueError):
        return []
    names = [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    classes = [name.lower() for name in names if name[:1].isupper() and name != "Optimizer"]
    return sorted({*classes, *OUR_OPTIMIZERS}) if classes and "*" not in names else []
