"""torch's backends for averages among processes, and how a group of each is made.

NCCL takes a GPU of its own for each process; everything else goes over the host, by Gloo. Metadata always do: a group
of NCCL has one of Gloo beside it, because NCCL's kernels wait for a peer that is gone. A process that sees it on Gloo,
where a connection is closed, or hears of it from the server, aborts the group, and the kernels end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
MAX_SMALL_BYTES = 64 << 10  # at the lowest member, of all others
_TAG = 0  # messages of one tag keep their order


def device_name(device: torch.device) -> str:
    """HOST/cpu, or HOST/cuda/GPU where this process's torch has NCCL for it; GPU as no other is called."""
    host = os.uname().nodename
    if device.type != "cuda" or not dist.is_nccl_available():
        return f"{host}/{device.type}"
    return f"{host}/cuda/{torch.cuda.get_device_properties(device).uuid}"


def backend_of(devices: Sequence[str]) -> str:
    """For processes with these devices, as `device_name` says them."""
    have_nccl = all("/cuda/" in device for device in devices)
    return "nccl" if have_nccl and len(set(devices)) == len(devices) else "gloo"


def why_not_nccl(devices: Sequence[str]) -> str:
    """Why processes with these devices average over Gloo although some have a GPU; empty where they do not."""
    on_gpus = [device for device in devices if "/cuda" in device]
    if not on_gpus or backend_of(devices) == "nccl":
        return ""
    if without := sum("/cuda/" not in device for device in devices):
        return f"{without} of {len(devices)} processes have no GPU, or a torch without NCCL"
    gpus = len(set(devices))
    return (
        f"{len(devices)} processes share {gpus} GPU{'s' if gpus > 1 else ''}, and NCCL takes one process for each GPU"
    )


def gloo(store: dist.Store, rank: int, size: int, at: Any, timeout_s: float) -> Any:
    """RuntimeError where members do not connect. `at`: torch's device for Gloo, where this process listens."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [at]
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(store, rank, size, options)


def nccl(store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    """As `gloo`, after `without_watchdog`; who makes the group aborts it."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    group = dist.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)
    return group


def without_watchdog() -> Callable[[], None]:
    """torch's own watchdog would end the process for a peer that is gone: not for groups of NCCL that are made from now
    on, until the returned function is called. Both on the main thread, before others may read the environment."""
    before = os.environ.get(_ERRORS)
    os.environ[_ERRORS] = "0"  # the constructor of a group reads it

    def undo() -> None:
        if before is None:
            os.environ.pop(_ERRORS, None)
        else:
            os.environ[_ERRORS] = before

    return undo


def computed(device: torch.device) -> None:
    """Returns when all that this thread has asked of the device is done: what a GPU is asked is only queued."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def broadcast_from(source: int) -> Any:
    """torch's options for a broadcast by the process of this rank."""
    options = dist.BroadcastOptions()
    options.rootRank = source
    return options


class Small:
    """A sum of a few bytes over a group of Gloo, in place, by way of the lowest member; begun by the constructor.

    A collective of Gloo has many steps, each of which wakes a thread on every member: 5.2 ms for 1 KB between four
    processes on two cores of 2.6 GHz, where a message to one and back takes 0.5. `group` returns torch's group while it
    is open: a work with a reference would keep it open.
    """

    def __init__(self, group: Callable[[], Any], tensor: torch.Tensor, index: int, size: int, timeout_s: float) -> None:
        """`index`: of this member, of `size`. `tensor` is contiguous, and unused by others until `wait` returns."""
        self._group, self._tensor, self._timeout = group, tensor, timedelta(seconds=timeout_s)
        self._others = range(1, size) if index == 0 else range(0)
        self._parts = [torch.empty_like(tensor) for _ in self._others]
        self._works = [group().recv([part], other, _TAG) for part, other in zip(self._parts, self._others, strict=True)]
        if index:
            # Into the same memory: the sum comes when the lowest has all of what is sent.
            self._works = [group().send([tensor], 0, _TAG), group().recv([tensor], 0, _TAG)]

    def wait(self) -> None:
        """Raises RuntimeError as torch's."""
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
