"""Creates torch process groups with the NCCL or Gloo backend.

NCCL needs a GPU for each process. All other averages go over the host with Gloo. Metadata always use Gloo, so an NCCL
group has a Gloo group beside it, because NCCL's kernels wait for a peer that is gone. A process notices the loss on
Gloo, where a connection closes, or the server reports it. It then aborts the group, which ends the kernels.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ....common.config.addresses import join_address, split_address
from ....common.errors import UsageError
from .store import Address, Store, StoreServer

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


# ---- rendezvous ----------------------------------------------------------------------------------
# How members of a generation find each other, and which member leaves if some cannot connect.
#
# A group needs connections between all its members. A member that others cannot reach would stop the whole group,
# even if all members reach the server. So each member publishes which others it reaches before they connect. It also
# counts failures in a row with the same members, and gives up after a number that depends on the reason. The member
# whose departure helps most gives up first, and the others average without it.


# Failed attempts in a row before this member ends, if the cause is this member, another member, or unknown.
HERE, OTHER, UNKNOWN = 3, 6, 9

_REACH_S = 5.0  # to connect to a member
_WAIT_S = 1.0  # for one request to the store


class Generation(NamedTuple):
    """The members that average, as the server names them."""

    number: int  # grows with each generation
    members: tuple[int, ...]  # ascending ranks
    store: Address  # of the lowest rank's `Rendezvous`
    name: str = ""  # unique at this store
    secret: bytes = b""  # known only to the members
    stage: int = 0  # of a pipeline; each averages in a group of its own

    @property
    def full_name(self) -> str:
        return f"generation/{self.name or self.number}"


class Rendezvous(StoreServer):
    """A store where members of a generation find each other. Every worker has one; the lowest rank's is used."""

    def __init__(self, host: str) -> None:
        """Listen on `host`. Raises UsageError if torch has no Gloo."""
        if not (dist.is_available() and dist.is_gloo_available()):
            message = f"this worker cannot average with the others: its torch {torch.__version__} is without Gloo"
            raise UsageError(message, fix="install a torch with distributed support, or --mode sync")
        super().__init__(host)


class MemberInfo(NamedTuple):
    """The facts that a member publishes about itself."""

    device: str
    rendezvous: Address  # the address of its `Rendezvous`
    listens: Address  # the address at which it accepts connections


class Broken(Exception):
    """The group of this generation failed, because a member is gone or did not arrive.

    This worker ends after `attempts` such failures in a row.
    """

    def __init__(self, message: str, attempts: int = UNKNOWN) -> None:
        super().__init__(message)
        self.attempts = attempts


class OutOfReach(Broken):
    """A member's address accepts no connections. The member is gone, or this host cannot use the address."""


def store_of(generation: Generation, rank: int, timeout_s: float) -> Store:
    """Connect to the generation's store. Raises OutOfReach or Broken."""
    # Of two members, the one that cannot reach the other leaves. Of more, the lowest leaves if nobody reaches its
    # store.
    attempts = HERE if len(generation.members) == 2 else OTHER
    if (out_of_reach := reach(rank, generation.members[0], generation.store, attempts)) is not None:
        raise out_of_reach
    try:
        found = generation.store, generation.secret
        return Store(lambda: found, generation.full_name, rank, timeout_s, f"{generation.stage}/")
    except TimeoutError:  # the store is there and does not know this generation yet
        raise _missing([generation.members[0]], rank, generation, timeout_s) from None
    except OSError as error:
        raise Broken(f"generation {generation.number}: its store is gone: {first_line(error)}") from None


def come_together(
    store: dist.Store, generation: Generation, rank: int, local: MemberInfo, timeout_s: float
) -> list[MemberInfo]:
    """Meet all members, by index. Returns when each has published that it reaches all others.

    Raises Broken if a member does not arrive within `timeout_s` (the message names it) or cannot be reached.
    """
    device, *addresses = local
    store.set(f"here/{rank}", " ".join([device, *starmap(join_address, addresses)]))
    try:
        words = _all(store, "here", generation, rank, timeout_s)
        members = [MemberInfo(device, *map(split_address, addresses)) for device, *addresses in words]
        with ThreadPoolExecutor(len(members)) as threads:
            addresses = [member.rendezvous for member in members]
            failed = list(threads.map(partial(reach, rank), generation.members, addresses))
        lost = [member for member, error in zip(generation.members, failed, strict=True) if error is not None]
        store.set(f"lost/{rank}", " ".join(map(str, lost)) or "-")
        words = _all(store, "lost", generation, rank, timeout_s + _REACH_S)
    except RuntimeError as error:
        raise Broken(f"generation {generation.number}: its store is gone: {first_line(error)}") from None
    numbers = [{int(other) for other in others if other != "-"} for others in words]
    unreached = dict(zip(generation.members, numbers, strict=True))
    if (leaving := who_leaves(unreached)) is not None:
        member, other = next((member, min(others)) for member, others in unreached.items() if others)
        suffix = "" if rank == other else f" and rank {rank}"
        message = f"rank {member} cannot reach rank {other}, to average with it{suffix}"
        found = next(filter(None, failed), None) or Broken(message)
        found.attempts = HERE if leaving == rank else OTHER
        raise found
    return members


def collected(
    store: dist.Store, topic: str, ranks: Sequence[int], own_rank: int, timeout_s: float
) -> tuple[list[bytes], list[int]]:
    """Collect the values `topic/RANK` of these ranks that arrive within `timeout_s`, and list the missing ranks.

    Raises RuntimeError if the store is gone.
    """
    until = time.monotonic() + timeout_s
    missing = [rank for rank in ranks if rank != own_rank]
    while missing and time.monotonic() < until:
        with suppress(dist.DistStoreError):
            left_s = max(0.001, min(_WAIT_S, until - time.monotonic()))
            store.wait([f"{topic}/{rank}" for rank in missing], timedelta(seconds=left_s))
        missing = [rank for rank in missing if not store.check([f"{topic}/{rank}"])]
    return [store.get(f"{topic}/{rank}") for rank in ranks if rank not in missing], missing


def _all(store: dist.Store, topic: str, generation: Generation, rank: int, timeout_s: float) -> list[list[str]]:
    """The words of each member on this topic, by index. Raises Broken or RuntimeError."""
    found, missing = collected(store, topic, generation.members, rank, timeout_s)
    if missing:
        raise _missing(missing, rank, generation, timeout_s)
    return [text.decode().split() for text in found]


def _missing(missing: Sequence[int], rank: int, generation: Generation, timeout_s: float) -> Broken:
    """The error for members that did not come to the store."""
    named = ", ".join(map(str, missing))
    store = join_address(*generation.store)
    message = f"generation {generation.number}: rank {named} did not come to {store} in {timeout_s:g} s"
    if len(generation.members) == 2:
        return Broken(message, OTHER)
    is_alone = rank == generation.members[0] and len(missing) == len(generation.members) - 1
    return Broken(message, HERE if is_alone else UNKNOWN)


def who_leaves(unreached: Mapping[int, set[int]]) -> int | None:
    """Choose the member to leave, given the members that each could not reach; None: all reach all.

    It is the member with the most failed connections, and among several the highest rank.
    """
    failed = {frozenset((member, other)) for member, others in unreached.items() for other in others}
    count = Counter(item for pair in failed for item in pair)
    return max(count, key=lambda item: (count[item], item), default=None)


def reach(rank: int, other: int, address: Address, attempts: int = UNKNOWN) -> OutOfReach | None:
    """Connect to this address, and close the connection. Returns the error if it accepts none."""
    try:
        socket.create_connection(address, _REACH_S).close()
    except OSError as error:
        message = f"rank {rank} cannot reach rank {other} at {join_address(*address)}, to average with it: {error}"
        return OutOfReach(message, attempts)
    return None


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
