"""worker.max_mbit: over any stretch of time no more passes than it says, and a burst."""

from __future__ import annotations

import queue
import random
import threading

import pytest

from paramserver.common.wire.direct import out_of_band_messages
from paramserver.common.wire.frames import frame
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.worker.conversation.channel import next_frame
from paramserver.worker.conversation.stream_client import _drain
from paramserver.worker.transports import limit as limit_file
from paramserver.worker.transports.limit import Limit

from .test_direct_receiving import connected

BURST_S = 0.05


class _Time:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> _Time:
    found = _Time()
    monkeypatch.setattr(limit_file, "time", found)
    return found


def test_no_stretch_of_time_passes_more_than_the_rate_and_a_burst(time: _Time) -> None:
    draw, limit = random.Random(7), Limit(8.0)  # 1 MB/s
    passed: list[tuple[float, float, int]] = []  # begun, through, bytes
    for _ in range(300):
        time.now += draw.choice([0.0, 0.0, 0.3]) * draw.random()
        begun, num_bytes = time.now, draw.choice([100, 10_000, 200_000])
        limit.sent(num_bytes)
        passed.append((begun, time.now, num_bytes))
    for first in range(0, 300, 17):
        num_bytes = 0
        for begun, through, more in passed[first:]:
            num_bytes += more
            assert num_bytes <= 1e6 * (through - passed[first][0] + BURST_S) + 1e-3, begun


def test_who_sends_all_the_time_gets_the_rate_and_the_way_back_is_another_one(time: _Time) -> None:
    limit = Limit(8.0)
    for _ in range(100):
        limit.sent(100_000)
    assert abs(time.now - 100.0 - 10.0) <= BURST_S + 1e-6
    limit.received(10_000)
    assert abs(time.now - 110.0) <= BURST_S + 1e-6


def test_without_a_limit_nothing_waits(time: _Time) -> None:
    limit, began = Limit(None), time.now
    limit.sent(1 << 40)
    limit.received(1 << 40)
    assert limit.at_once == 0 and time.now == began


class _Counted(Limit):
    """Notes what passes, and waits for nothing."""

    def __init__(self) -> None:
        super().__init__(8.0)
        self.up: list[int] = []
        self.down: list[int] = []

    def sent(self, num_bytes: int) -> None:
        self.up.append(num_bytes)

    def received(self, num_bytes: int) -> None:
        self.down.append(num_bytes)


def test_a_direct_connection_counts_every_byte_in_small_pieces_both_ways() -> None:
    limit = _Counted()
    direct, server = connected(limit)
    payload = random.Random(1).randbytes(1_000_003)
    taken = bytearray()

    def echo() -> None:
        while data := server.recv(1 << 16):
            taken.extend(data)
        server.sendall(payload)

    echoing = threading.Thread(target=echo)
    echoing.start()
    direct.send(out_of_band_messages([memoryview(payload)]))
    direct.half_close()
    echoing.join(10)
    received = bytearray(len(payload))
    direct.receive_into(iter([memoryview(received)]))
    assert received == payload and taken.endswith(payload)
    assert sum(limit.up) == len(taken) and sum(limit.down) == len(payload)
    assert max(*limit.up, *limit.down) <= limit.at_once
    direct.close()
    server.close()


def test_a_stream_counts_every_message_both_ways() -> None:
    limit = _Counted()
    outgoing: queue.SimpleQueue = queue.SimpleQueue()
    for frames in ([b"a" * 10, b"b" * 20], [b"c" * 30], None):
        outgoing.put(frames)
    assert b"".join(_drain(outgoing, limit)) == b"a" * 10 + b"b" * 20 + b"c" * 30
    raw = frame(pb.ServerMessage(waiting=pb.Waiting(reason="a round")))
    assert next_frame(iter([raw]), limit).kind == "waiting"
    assert (limit.up, limit.down) == ([10, 20, 30], [len(raw)])
