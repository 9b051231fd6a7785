"""Checks of this machine: whether it has the device, and whether servers can listen at their addresses."""

from __future__ import annotations

import errno
import glob
import os
import re
import socket
import time
from importlib.util import find_spec
from pathlib import Path

from ...errors import BindError, UsageError
from ..addresses import split_address

# Files of the drivers of NVIDIA (also on Jetson), AMD and WSL 2.
_DRIVERS = ("/dev/nvidia*", "/proc/driver/nvidia/gpus/*", "/dev/nvhost*", "/dev/nvmap", "/dev/kfd", "/dev/dxg")
# A process that was just killed may still have the port, until the kernel has ended it.
_WAIT_S, _AGAIN_S = 1.0, 0.05


def check_device(name: str) -> None:
    """Raise UsageError if this machine cannot have the CUDA device. torch.cuda checks again once torch is loaded."""
    if not name.startswith("cuda"):
        return
    if _built_without_cuda():
        why = "its torch is built without CUDA"
    elif os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        why = "CUDA_VISIBLE_DEVICES hides all"
    elif any(glob.glob(pattern) for pattern in _DRIVERS):
        return
    else:
        why = "there is no driver of a GPU"
    raise UsageError(f"--device {name}: this machine has 0 CUDA devices: {why}", fix="use --device auto or cpu")


def torch_folder() -> Path | None:
    """Return the folder in which torch is installed, without importing it. None if torch is not installed."""
    spec = find_spec("torch")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def _built_without_cuda() -> bool:
    """Whether torch/version.py says that torch has no CUDA; False if the file does not say it."""
    try:
        text = ((torch_folder() or Path()) / "version.py").read_text()
    except OSError:
        return False
    versions = re.findall(r"^(?:cuda|hip|rocm)\b[^=\n]*=\s*(.*)$", text, re.MULTILINE)
    return bool(versions) and all(value.strip() == "None" for value in versions)


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
