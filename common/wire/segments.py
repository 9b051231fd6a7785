"""Segments: memory that a server and a worker on one host share to exchange tensors.

A segment is a Linux memfd. It has no name in a file system, and the kernel frees it with its last mapping, so it never
outlives its processes. The maker sends its address: host, process, descriptor and a random label. The other process
opens it through /proc, which the kernel allows only to processes of the same user. Seals fix the size, so that neither
process can make the other one fault. `open_segment` raises SegmentError if the system lacks any of this, or if the
other process is on another host or in another container. The tensors then travel over the connection.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import re
import secrets
import sys

import torch

from ...proto import parameter_server_pb2 as pb
from ..tensors.layout import as_bytes, new_payload

_PREFIX = "paramserver-"
_LABEL = re.compile(r"[0-9a-f]{32}")


class SegmentError(Exception):
    """A segment cannot be made or opened. The text is the reason."""


class Segment:
    """Shared memory as a payload, uint8 [num_bytes]. `address` is None if no other process can open it."""

    def __init__(self, payload: torch.Tensor, address: pb.Segment | None, descriptor: int | None = None) -> None:
        self.payload = payload
        self.bytes = as_bytes(payload)
        self.address = address
        self._descriptor = descriptor

    def close(self) -> None:
        """Close the descriptor, so that no process can open the segment. The last tensor frees the memory."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            self.address = None

    def __del__(self) -> None:
        self.close()


def new_segment(num_bytes: int) -> Segment:
    """Return zeroed memory that other processes of this user on this host can open. Raises SegmentError."""
    label = secrets.token_hex(16)
    try:
        descriptor = os.memfd_create(_PREFIX + label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
            payload = _map(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
    except (OSError, ValueError, AttributeError) as error:
        raise SegmentError(f"no shared memory of {num_bytes} bytes: {error}") from None
    address = pb.Segment(host=this_host(), pid=os.getpid(), descriptor=descriptor, label=label, num_bytes=num_bytes)
    return Segment(payload, address, descriptor)


def private_segment(num_bytes: int) -> Segment:
    """Return a segment in ordinary memory, which only this process can use."""
    return Segment(new_payload(num_bytes), None)


def open_segment(address: pb.Segment) -> Segment:
    """Map a segment that another process made. Raises SegmentError unless the descriptor is exactly this segment."""
    if address.host != this_host():
        raise SegmentError("the other process runs on another host")
    if not _LABEL.fullmatch(address.label) or address.num_bytes < 1:
        raise SegmentError("not an address of a segment")
    path, expected = f"/proc/{address.pid}/fd/{address.descriptor}", f"/memfd:{_PREFIX}{address.label} (deleted)"
    try:
        # Check the link before opening it: opening another kind of file could block or have side effects.
        if os.readlink(path) != expected:
            raise SegmentError("the descriptor is not the segment's")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise SegmentError(f"process {address.pid} does not share its memory: {error.strerror}") from None
    try:
        if os.readlink(f"/proc/self/fd/{descriptor}") != expected:
            raise SegmentError("the descriptor is not the segment's")
        if os.fstat(descriptor).st_size != address.num_bytes:
            raise SegmentError(f"the segment has {os.fstat(descriptor).st_size} bytes, not {address.num_bytes}")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() != _seals():
            raise SegmentError("the segment could be cut short by its owner")
        return Segment(_map(descriptor, address.num_bytes), address)
    except (OSError, ValueError) as error:
        raise SegmentError(f"cannot map {address.num_bytes} bytes: {error}") from None
    finally:
        os.close(descriptor)


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _map(descriptor: int, num_bytes: int) -> torch.Tensor:
    mapped = mmap.mmap(descriptor, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


@functools.cache
def this_host() -> str:
    """Return the kernel's id of this boot, or a random id where the kernel has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return f"{sys.platform}-{secrets.token_hex(16)}"
