"""Random, mutated and lying messages: refused with a reason, quickly, in bounded memory, and the next worker is served.

Each input comes from a seed that is printed when it fails.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable

import grpc
import pytest

from paramserver.common.errors import ParamServerError
from paramserver.common.wire.checks import check_header, hyperparameters_from_proto
from paramserver.common.wire.frames import parse
from paramserver.common.wire.protocol import SERVICE, layout_from_proto, optimizer_from_proto
from paramserver.common.wire.segments import open_segment
from paramserver.proto import parameter_server_pb2 as pb

from . import conftest as wire

MAX_S = 3.0


def take(raw: bytes) -> None:
    """All that a server reads out of a message before it acts on it. Raises ParamServerError or SegmentError."""
    received = parse(pb.WorkerMessage, raw)
    if received.kind is None:
        return
    header = received.header
    check_header(header)
    if received.kind == "model":
        if header.HasField("segment"):
            open_segment(header.segment)
        layout = layout_from_proto(header.tensors)
        assert 0 <= layout.exchange_bytes <= layout.total_bytes < 2**50
        assert len(layout.fingerprint) == 64
        optimizer_from_proto(header.optimizer, layout)
    elif received.kind == "contribution":
        hyperparameters_from_proto(header.training.hyperparameters)


def rss_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def tensor(name: bytes = b"w", rest: bytes = b"") -> bytes:
    return field(1, field(1, name) + b"\x10\x01" + field(3, b"float32") + rest)


def hyperparameter(value: bytes) -> bytes:
    return field(4, field(6, field(1, field(1, b"betas") + field(2, value))))


MANY = 4 << 20
BOMBS: dict[str, Callable[[], bytes]] = {  # made when they are needed: together they take seconds
    "four million tensors": lambda: field(2, b"\x0a\x00" * (MANY - 10)),
    "four hundred thousand named tensors": lambda: field(2, b"".join(tensor(b"%d" % i) for i in range(390_000))),
    "a million dimensions": lambda: field(2, tensor(rest=field(4, b"\x7f" * 1_000_000))),
    "dimensions whose product overflows": lambda: field(2, tensor(rest=field(4, varint(2**63 - 1) * 60))),
    "two million aliases": lambda: field(2, tensor(rest=b"\x2a\x01a" * (MANY // 2))),
    "a name of 8 MB": lambda: field(2, tensor(b"w" * (2 * MANY - 100))),
    "a name with a NUL": lambda: field(2, tensor(b"a\0b")),
    "a name of two lines": lambda: field(2, tensor(b"a\nb")),
    "four million optimizer groups": lambda: field(2, tensor() + field(3, b"\x12\x00" * (MANY - 100))),
    "two million tensors in a group": lambda: field(2, tensor() + field(3, field(2, b"\x0a\x01a" * (MANY // 2)))),
    "an optimizer's name of 8 MB": lambda: field(2, tensor() + field(3, field(1, b"a" * (2 * MANY - 100)))),
    "a codec's name of 8 MB": lambda: field(4, field(7, b"a" * (2 * MANY - 100))),
    "four million groups of hyperparameters": lambda: field(4, b"\x32\x00" * (MANY - 10)),
    "a list of three million values": lambda: hyperparameter(field(6, b"\x0a\x00" * (MANY - MANY // 4))),
    "a host's name of 8 MB": lambda: field(1, field(4, b"h" * (2 * MANY - 100))),
    "half a million metrics": lambda: field(
        6, b"".join(field(1, field(1, b"%d" % i) + b"\x11" + bytes(8)) for i in range(400_000))
    ),
    "four million fields nobody knows": lambda: b"\x30\x00" * MANY,
    "four million empty pieces": lambda: b"\x7a\x00" * MANY,
    "four million offsets": lambda: b"\x70\x00" * MANY,
    "one data field that claims to be 1 TiB": lambda: b"\x7a" + varint(1 << 40) + b"abc",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_message_that_is_all_too_much(name):
    """8 MB at most, and written to cost as much as can be: seconds and memory are bounded."""
    bomb = BOMBS[name]()
    started = time.process_time()
    with pytest.raises(ParamServerError) as caught:
        take(bomb)
    assert time.process_time() - started < MAX_S
    assert len(caught.value.message) < 2000


def test_structs_nested_deeper_than_any_hyperparameter():
    value = b"\x11" + bytes(8)
    for _ in range(5_000):
        value = field(6, field(1, value))
    with pytest.raises(ParamServerError):
        take(hyperparameter(value))


# ---- over a socket ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("server", ["grpc", "direct"], indirect=True)
def test_a_server_takes_every_bomb(server):
    """Each as the message after a polite Join, or after a Model the first over a direct connection; the next worker is
    served at once, and memory comes back."""
    server.check_is_well(7)
    grown = []
    for bombs in (BOMBS, dict(list(BOMBS.items())[:6])):
        before, most = server.rss_bytes, 0
        for bomb in bombs.values():
            peer = server.peer(8)
            polite = [wire.join_bytes(8), *([wire.model_bytes()] if server.transport == "direct" else [])]
            peer.send(*polite, bomb())
            peer.hang_up()
            assert peer.ended()[:2] == ("INVALID_ARGUMENT", "BAD_REQUEST")
            peer.close()
            most = max(most, server.rss_bytes - before)
        grown.append(most)
    print(f"{len(BOMBS)} bombs: {grown[0] / 1e6:+.1f} MB, and some of them again: {grown[1] / 1e6:+.1f} MB")
    assert grown[0] < 128 << 20
    assert grown[1] < 32 << 20
    server.check_is_well(7)


# ---- what gRPC refuses by itself ---------------------------------------------------------------------
# Of one transport; `test_direct.py` has the lengths, and the bytes that are no ticket, of the other.


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param([("k", "v" * 20_000)], id="a value of 20 KB"),
        pytest.param([("k", "v" * (1 << 20))], id="a value of 1 MB"),
        pytest.param([(f"k{i}", "") for i in range(5_000)], id="five thousand keys"),
    ],
)
def test_huge_metadata_is_refused_before_the_call_begins(server, metadata):
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream(f"/{SERVICE}/Exchange")(iter([]), metadata=metadata))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not server.events("internal_error")


def test_a_message_beyond_the_limit_is_refused_before_it_is_read(server):
    server.check_is_well(7)
    before = server.rss_bytes
    peer = server.peer(9)
    peer.send(wire.join_bytes(9), bytes(64 << 20))
    assert peer.ended()[0] in ("RESOURCE_EXHAUSTED", "INTERNAL", "UNKNOWN")
    raw = server.raw_peer()
    raw.call("Exchange")
    raw.message(b"abc", num_announced=(1 << 32) - 1)
    assert raw.has_ended.wait(20)
    grown = server.rss_bytes - before
    print(f"64 MB and 4 GiB announced: {grown / 1e6:+.1f} MB")
    assert grown < 12 << 20
    server.check_is_well(7)


def test_bytes_that_are_no_http2(server):
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), bytes(4096), struct.pack(">I", 0x16030100) * 100):
        raw = server.raw_peer()
        raw.garbage(garbage)
        assert raw.has_ended.wait(20)
    server.check_is_well(7)
