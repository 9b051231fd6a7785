"""Peers that say nothing, say it one byte at a time, or do not listen: they are let go, and nobody waits for them."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from paramserver.common.wire.direct import HELLO
from paramserver.common.wire.frames import out_of_band_frame
from paramserver.proto import parameter_server_pb2 as pb

from . import conftest as wire

both_transports = pytest.mark.parametrize(
    "server", ["grpc", pytest.param("direct", marks=pytest.mark.slow)], indirect=True
)
NUM_SILENT = 1500
NUM_STEPS = 60


@pytest.fixture
def many_descriptors():
    """Sockets by the thousand in this process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Pair:
    """Two well-behaved workers, played in turn; `steps` gives the seconds each pair of exchanges took."""

    def __init__(self, server: Any) -> None:
        self.peers = [server.peer(rank) for rank in (40, 41)]
        for peer in self.peers:
            peer.join()

    def steps(self, count: int) -> list[float]:
        took = []
        for _ in range(count):
            started = time.perf_counter()
            for peer in self.peers:
                peer.contribute()
            assert [peer.reply() for peer in self.peers] == ["APPLIED", "APPLIED"]
            took.append(time.perf_counter() - started)
        return took

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


@pytest.fixture
def pair(server):
    pair = Pair(server)
    pair.steps(5)
    yield pair
    pair.close()


def compare(text: str, before: list[float], during: list[float]) -> None:
    """Generous: other work may run on these cores. The metric to read is printed."""
    ms = [statistics.median(times) * 1e3 for times in (before, during)]
    print(f"{text}: median step {ms[0]:.2f} ms without, {ms[1]:.2f} ms with them: {ms[1] / ms[0] - 1:+.0%}")
    assert ms[1] < 3 * ms[0] + 20


@both_transports
def test_silent_sockets_disturb_nobody_and_are_closed(server, pair, many_descriptors):
    """Some say nothing at all, some begin (HTTP/2, or to show a ticket) and stop: deadlines end both, gRPC's own or the
    direct port's."""
    port, begun = int(server.address.rpartition(":")[2]), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    if server.transport == "direct":
        port, begun = server.events("listening")[0]["direct_port"], HELLO[:3]
    before = pair.steps(NUM_STEPS)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(NUM_SILENT)]
        for item in sockets[::2]:
            with contextlib.suppress(ConnectionError):  # of so many the oldest have been closed already
                item.sendall(begun)
        at_first = pair.steps(NUM_STEPS)
        server.check_is_well(7)  # who comes now is let in
        during = pair.steps(NUM_STEPS)
        poll, left = select.poll(), {socket.fileno(): socket for socket in sockets}
        for descriptor in left:
            poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + 40
        while left and time.monotonic() < deadline:
            for descriptor, _ in poll.poll(200):
                with contextlib.suppress(ConnectionError):
                    if left[descriptor].recv(65536):
                        continue
                poll.unregister(descriptor)
                del left[descriptor]
        assert not left, f"{len(left)} of {NUM_SILENT} silent connections are still open"
    compare(f"{NUM_SILENT} silent sockets, while they connect", before, at_first)
    compare(f"{NUM_SILENT} silent sockets, connected", before, during)
    server.check_is_well(7)


def announces(server: Any) -> tuple[int, Callable[[bytes], None]]:
    """Who has joined, and announced a contribution and what carries it: a message over gRPC, bytes that are placed
    over a direct connection. Its rank, and what sends some of these."""
    if server.transport == "direct":
        peer = server.peer(71)
        peer.join()
        header = wire.contribution_header(peer.seq + 1, peer.version, in_shared_memory=True)
        peer.send(header.SerializeToString(), out_of_band_frame(0, header.contribution.payload.num_bytes))
        return 71, peer.raw
    slow = server.raw_peer()
    slow.call("Exchange")
    slow.message(wire.join_bytes(42))
    server.until_event("joined", rank=42)
    slow.message(wire.model_bytes())
    server.until_event("admitted", rank=42)
    slow.message(wire.contribution_header(1).SerializeToString())
    slow.message(b"\x7a", num_announced=wire.NUM_FLOATS * 4)
    return 42, slow.more


@both_transports
def test_a_sender_of_single_bytes_is_let_go(server, pair):
    """Slower than limits.progress_s allows, while others train."""
    before = pair.steps(NUM_STEPS)
    rank, send = announces(server)
    during, refused = [], []
    started = time.monotonic()
    while not refused and time.monotonic() - started < 10:
        with contextlib.suppress(OSError):  # it has been let go
            send(b"\0")
        during += pair.steps(3)
        refused = [event for event in server.events("refused") if event["rank"] == rank]
    assert (refused[0]["reason"], "of an upload are missing" in refused[0]["message"]) == ("TOO_SLOW", True)
    compare("a sender of single bytes", before, during)
    server.check_is_well(rank)


def asks_and_never_reads(server: Any) -> int:
    """Its rank. Over gRPC its first weights fill the window of its connection, over a direct one replies fill what the
    system holds of them."""
    if server.transport == "direct":
        deaf = server.peer(70)
        deaf.join()
        for number in range(1, 40):
            deaf.send(*wire.contribution(deaf.seq + number, deaf.version))
        return 70
    deaf = server.raw_peer(room=False)
    deaf.call("Exchange")
    deaf.message(wire.join_bytes(43))
    server.until_event("joined", rank=43)
    deaf.message(wire.model_bytes())
    server.until_event("admitted", rank=43)
    return 43


@both_transports
def test_a_reader_that_never_reads_is_let_go(server, pair):
    """The server does not wait for ever with the rest."""
    before = pair.steps(NUM_STEPS)
    rank = asks_and_never_reads(server)
    during, left = [], []
    started = time.monotonic()
    while not left and time.monotonic() - started < 15:
        during += pair.steps(5)
        left = [event for event in server.events("left") if event["rank"] == rank]
    assert left and " bytes of a reply within 1.5 s (limits.progress_s)" in left[0]["reason"]
    compare("a reader that never reads", before, during)
    server.check_is_well(rank)


def test_who_pulls_and_never_reads_is_let_go(server, pair):
    """Each pull holds a copy of the weights: a few do so at once, and none for ever. Of one transport: pulls go over
    gRPC whatever the workers' transport is."""

    def ended() -> list[dict[str, Any]]:
        return [event for event in server.events("refused") if event["rank"] is None]  # that of no worker

    num_before = len(ended())
    deaf = [server.raw_peer(room=False) for _ in range(6)]
    for item in deaf:
        item.call("Pull")
        item.message(b"")
    pair.steps(5)
    server.until(lambda: len(ended()) >= num_before + len(deaf), "end of every pull")
    assert {event["reason"] for event in ended()[num_before:]} == {"TOO_SLOW"}
    pair.steps(5)


@both_transports
def test_who_does_not_send_what_it_announced(server):
    """Without bytes of its own, through gRPC: the refusal arrives, with its reason."""
    peer = server.peer(44)
    peer.join()
    peer.send(wire.contribution_header(1).SerializeToString())
    status, reason, text = peer.ended()
    assert (status, reason) == ("ABORTED", "TOO_SLOW")
    assert f"{wire.NUM_FLOATS * 4} bytes of an upload are missing" in text


@both_transports
def test_an_upload_that_nobody_waits_for_may_pause_while_it_is_computed(server):
    """Gradients leave during backward, which takes as long as it takes."""
    peer = server.peer(45)
    peer.join()
    peer.send(wire.begin_bytes())
    time.sleep(2.5)  # what is tested is that time passes and nothing happens
    peer.contribute()
    assert peer.reply() == "APPLIED"


@both_transports
def test_who_has_finished_owes_nothing_of_an_upload_that_it_began(server, pair):
    """It waits for the others, however long they take."""
    peer = server.peer(46)
    peer.join()
    peer.send(wire.begin_bytes(), pb.WorkerMessage(finish=pb.Finish()).SerializeToString())
    server.until_event("finished", rank=46)
    time.sleep(2.5)  # what is tested is that time passes and nothing happens
    assert not [event for event in server.events("refused") if event["rank"] == 46]
    peer.close()
