"""Memory shared between real processes: opened only when it is exactly what was offered, and never left behind."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paramserver.common.wire.segments import Segment, SegmentError, new_segment, open_segment
from paramserver.proto import parameter_server_pb2 as pb

if not sys.platform.startswith("linux"):
    pytest.skip("memfd is Linux's", allow_module_level=True)

NUM_BYTES = 1 << 20

# Does what it is told, one JSON line at a time, and says what came of it.
CHILD = """
import json, os, sys
import encodings.ascii  # another user may not read root's libraries
from paramserver.common.wire.segments import SegmentError, new_segment, open_segment
from paramserver.proto import parameter_server_pb2 as pb
held = {}
for line in sys.stdin:
    order = json.loads(line)
    try:
        match order["do"]:
            case "make":
                held["segment"] = new_segment(order["num_bytes"])
                reply = {field.name: value for field, value in held["segment"].address.ListFields()}
            case "open":
                held["segment"] = open_segment(pb.Segment(**order["address"]))
                reply = held["segment"].payload.numel()
            case "fill":
                held["segment"].payload.fill_(order["value"])
                reply = order["value"]
            case "first":
                reply = held["segment"].payload[0].item()
            case "close":
                reply = held["segment"].close()
            case "become":
                os.setgroups([]); os.setgid(order["user"])
                reply = os.setuid(order["user"])
    except SegmentError as error:
        reply = "SegmentError: " + str(error)
    print(json.dumps(reply), flush=True)
"""


class Child:
    def __init__(self) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def order(self, do: str, **arguments: Any) -> Any:
        assert self.popen.stdin is not None and self.popen.stdout is not None
        self.popen.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.popen.stdin.flush()
        return json.loads(self.popen.stdout.readline())

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.communicate()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.kill()


def address_of(segment: Segment) -> pb.Segment:
    assert segment.address is not None
    return segment.address


def fields_of(address: pb.Segment, **changes: Any) -> dict[str, Any]:
    return {field.name: value for field, value in address.ListFields()} | changes


def holders(label: str) -> list[int]:
    """Processes that have the segment mapped or open."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if label in (folder / "maps").read_text():
                found.add(int(folder.name))
            for descriptor in os.listdir(folder / "fd"):
                with contextlib.suppress(OSError):  # closed since, as the one that listed them
                    if label in os.readlink(folder / "fd" / descriptor):
                        found.add(int(folder.name))
    return sorted(found)


def num_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# ---- two processes ------------------------------------------------------------------------------


def test_two_processes_see_the_same_bytes(child: Child) -> None:
    mine = new_segment(NUM_BYTES)
    assert child.order("open", address=fields_of(address_of(mine))) == NUM_BYTES
    child.order("fill", value=7)
    assert mine.payload.unique().tolist() == [7]
    mine.bytes[0] = 9
    assert child.order("first") == 9
    theirs = open_segment(pb.Segment(**child.order("make", num_bytes=4096)))
    child.order("fill", value=3)
    assert bytes(theirs.bytes) == b"\3" * 4096


def test_memory_outlives_its_owner_and_then_goes(child: Child) -> None:
    """SIGKILL of the owner: who has mapped it reads on; with the last mapping it is gone."""
    address = pb.Segment(**child.order("make", num_bytes=NUM_BYTES))
    segment = open_segment(address)
    child.order("fill", value=5)
    assert holders(address.label) == sorted([os.getpid(), child.popen.pid])
    child.kill()
    assert segment.payload.unique().tolist() == [5]
    assert holders(address.label) == [os.getpid()]
    with pytest.raises(SegmentError, match="does not share"):
        open_segment(address)
    payload = segment.payload
    del segment
    assert payload[-1] == 5, "a tensor keeps its memory"
    del payload
    gc.collect()
    assert holders(address.label) == []


def test_a_closed_segment_cannot_be_opened_any_more(child: Child) -> None:
    address = pb.Segment(**child.order("make", num_bytes=4096))
    child.order("close")
    with pytest.raises(SegmentError):
        open_segment(address)


def test_a_process_of_another_user_may_not_open_it(child: Child) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user in a child")
    segment = new_segment(4096)
    assert child.order("become", user=65534) is None
    refused = child.order("open", address=fields_of(address_of(segment)))
    assert refused.startswith("SegmentError: process ")


# ---- what is not the segment ----------------------------------------------------------------------


NOT_IT: dict[str, list[Any]] = {
    "host": ["", "6c1f7a0e-0000-0000-0000-000000000000"],
    "label": ["0" * 32, "../../../../../../etc/passwd", "0" * 32 + "\n", ""],
    "pid": [0, 1, os.getppid(), 2**32 - 1, -1],
    "descriptor": [0, 2**32 - 1, -1],
    "num_bytes": [0, -1, 4095, 8192, 2**63, 2**64 - 1],
}


@pytest.mark.parametrize("changes", [{name: value} for name, values in NOT_IT.items() for value in values], ids=str)
def test_an_address_that_is_not_exactly_the_segments(changes: dict[str, Any]) -> None:
    segment = new_segment(4096)
    before = num_descriptors()
    with pytest.raises((SegmentError, ValueError)):  # the message holds no negative number
        open_segment(pb.Segment(**fields_of(address_of(segment), **changes)))
    assert num_descriptors() == before


def address_with(descriptor: int, num_bytes: int = 4096) -> pb.Segment:
    address = address_of(new_segment(4096))
    address.descriptor, address.num_bytes = descriptor, num_bytes
    return address


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW])
def test_memory_that_its_owner_could_cut_short(seals: int) -> None:
    """With our name and size, but whoever reads it when it shrinks dies of SIGBUS."""
    address = address_with(0)
    descriptor = os.memfd_create(f"paramserver-{address.label}", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, 4096)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        before = num_descriptors()
        with pytest.raises(SegmentError, match="cut short"):
            open_segment(pb.Segment(**fields_of(address, descriptor=descriptor)))
        assert num_descriptors() == before
    finally:
        os.close(descriptor)


def test_other_descriptors_are_not_opened(tmp_path: Path) -> None:
    """Opening a pipe nobody writes to would block, opening a device could do anything."""
    reader, writer = os.pipe()
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    opened = [reader, writer, os.open(fifo, os.O_RDWR), os.open("/dev/null", os.O_RDWR), os.memfd_create("other")]
    try:
        for descriptor in opened:
            with pytest.raises(SegmentError, match="not the segment's"):
                open_segment(address_with(descriptor))
    finally:
        for descriptor in opened:
            os.close(descriptor)


def test_no_memory_of_that_size() -> None:
    before = num_descriptors()
    for num_bytes in (0, -1, 2**62):
        with pytest.raises(SegmentError):
            new_segment(num_bytes)
    assert num_descriptors() == before


# ---- nothing is left behind --------------------------------------------------------------------------


def shared_files() -> list[str]:
    """Without semaphores, which are never ours: other programs on the machine come and go with theirs."""
    return sorted(name for name in os.listdir("/dev/shm") if not name.startswith("sem."))


def test_segments_cost_no_descriptors_once_they_are_gone() -> None:
    before, files = num_descriptors(), shared_files()
    labels = []
    for _ in range(20):
        made = new_segment(4096)
        labels.append(address_of(made).label)
        opened = open_segment(address_of(made))
        del made, opened
    assert num_descriptors() == before
    assert shared_files() == files
    maps = Path("/proc/self/maps").read_text()
    assert not [label for label in labels if label in maps]


def test_a_child_inherits_no_descriptor() -> None:
    segment = new_segment(4096)
    listing = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, timeout=30, check=True)
    assert address_of(segment).label not in listing.stdout
