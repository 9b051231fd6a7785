"""Creates torch process groups with the NCCL or Gloo backend.

NCCL needs a GPU for each process. All other averages go over the host with Gloo. Metadata always use Gloo, so an NCCL
group has a Gloo group beside it, because NCCL's kernels wait for a peer that is gone. A process notices the loss on
Gloo, where a connection closes, or the server reports it. It then aborts the group, which ends the kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
MAX_SMALL_BYTES = 64 << 10  # received by the lowest member from all others
_TAG = 0  # messages with the same tag keep their order


def device_name(device: torch.device) -> str:
    """A name for the process's device: HOST/cpu, or HOST/cuda/UUID if torch has NCCL for its GPU. UUIDs are unique."""
    host = os.uname().nodename
    if device.type != "cuda" or not dist.is_nccl_available():
        return f"{host}/{device.type}"
    return f"{host}/cuda/{torch.cuda.get_device_properties(device).uuid}"


def backend_of(devices: Sequence[str]) -> str:
    """The backend for processes with these devices, which are named by `device_name`."""
    have_nccl = all("/cuda/" in device for device in devices)
    return "nccl" if have_nccl and len(set(devices)) == len(devices) else "gloo"


def why_not_nccl(devices: Sequence[str]) -> str:
    """Why processes with these devices use Gloo although some have a GPU; empty if they do not."""
    on_gpus = [device for device in devices if "/cuda" in device]
    if not on_gpus or backend_of(devices) == "nccl":
        return ""
    if without := sum("/cuda/" not in device for device in devices):
        return f"{without} of {len(devices)} processes have no GPU, or a torch without NCCL"
    gpus = len(set(devices))
    shared = f"{gpus} GPU{'s' if gpus > 1 else ''}"
    return f"{len(devices)} processes share {shared}, and NCCL takes one process for each GPU"


def gloo(store: dist.Store, rank: int, size: int, at: Any, timeout_s: float) -> Any:
    """Create a Gloo group.

    `at`: torch's Gloo device, where this process listens. Raises RuntimeError without connections.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [at]
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(store, rank, size, options)


def nccl(store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    """Create an NCCL group, as `gloo`. Call `without_watchdog` before. The caller aborts the group."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    group = dist.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)
    return group


def without_watchdog() -> Callable[[], object]:
    """Disable torch's watchdog for new NCCL groups until the returned function is called.

    The watchdog would end the process when a peer is gone. Call both functions on the main thread, before other threads
    read the environment.
    """
    before = os.environ.get(_ERRORS)
    os.environ[_ERRORS] = "0"  # read by the constructor of a group
    return partial(os.environ.update, {_ERRORS: before}) if before else partial(os.environ.pop, _ERRORS, None)


def computed(device: torch.device) -> None:
    """Wait until the device has done this thread's work. Work on a GPU is only queued."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def broadcast_from(source: int) -> Any:
    """torch's options for a broadcast from the process of this rank."""
    options = dist.BroadcastOptions()
    options.rootRank = source
    return options


class Small:
    """A sum of a few bytes over a Gloo group, in place, through the lowest member. The constructor starts it.

    A Gloo collective has many steps, and each wakes a thread on every member. A sum of 1 KB took 5.2 ms between four
    processes on two cores of 2.6 GHz; a message to one process and back took 0.5 ms. `group` returns torch's group
    while it is open, because a work that refers to it would keep it open.
    """

    def __init__(self, group: Callable[[], Any], tensor: torch.Tensor, index: int, size: int, timeout_s: float) -> None:
        """`index`: this member's, of `size`. `tensor` is contiguous, and reserved until `wait` returns."""
        self._group, self._tensor, self._timeout = group, tensor, timedelta(seconds=timeout_s)
        self._others = range(1, size) if index == 0 else range(0)
        self._parts = [torch.empty_like(tensor) for _ in self._others]
        self._works = [group().recv([part], other, _TAG) for part, other in zip(self._parts, self._others, strict=True)]
        if index:
            # The sum may overwrite the tensor: it arrives after the lowest member has received everything.
            self._works = [group().send([tensor], 0, _TAG), group().recv([tensor], 0, _TAG)]

    def wait(self) -> None:
        """Wait for the sum. Raises RuntimeError as torch does."""
        self._end()
        for part in self._parts:
            self._tensor += part
        self._works = [self._group().send([self._tensor], other, _TAG) for other in self._others]
        self._end()

    def _end(self) -> None:
        for work in self._works:
            work.wait(self._timeout)


def is_small(num_bytes: int, size: int) -> bool:
    return num_bytes * (size - 1) <= MAX_SMALL_BYTES
