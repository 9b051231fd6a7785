"""A real ps-server, and peers of it that say exactly the bytes they are told to: over gRPC, or as bare sockets."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec
from paramserver.common.wire.direct import ACCEPTED, HELLO
from paramserver.common.wire.frames import frame, message_frames, parse
from paramserver.common.wire.protocol import SERVICE, layout_to_proto, optimizer_to_proto
from paramserver.proto import parameter_server_pb2 as pb

from ..cluster import DEADLINE_S, Cluster
from ..records import contribution_proto


def layout_of(num_floats: int) -> Layout:
    return Layout([TensorSpec("w", Kind.PARAMETER, "float32", (num_floats,))])


# Too large for one message and for a connection's first window: its payloads wait in flow control when nobody reads.
NUM_FLOATS = 100_000
LAYOUT = layout_of(NUM_FLOATS)
OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)


_MODEL_TAG = bytes([pb.WorkerMessage.MODEL_FIELD_NUMBER << 3 | 2])
_IS_DIRECT = pb.WorkerMessage(model=pb.Model(direct=True)).SerializeToString()  # protobuf merges it
ENDLESS = ("--mode", "async", "--steps", "1000000")


class Peer:
    """One Exchange stream of raw messages; `rank` None takes a free one."""

    is_direct = False

    def __init__(self, address: str, rank: int | None = None) -> None:
        self.rank = rank
        self.seq = self.version = 0
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call: Any = self._channel.stream_stream(f"/{SERVICE}/Exchange")(iter(self._outgoing.get, None))

    def send(self, *raws: bytes) -> None:
        for raw in raws:
            self._outgoing.put(raw)

    def receive(self, *kinds: str | None) -> Any:
        while True:
            received = parse(pb.ServerMessage, next(self._call))
            if received.kind in kinds:
                return received
            assert received.kind == "waiting", received

    def join(self) -> Any:
        """Until the first weights are there; the first worker of a run brings zeros. Returns the welcome."""
        self.send(join_bytes(self.rank))
        welcome = self.receive("welcome").header
        self.send(model_bytes())
        received = self.receive("reply", "send_weights")
        if received.kind == "send_weights":
            self.send(*initial_weights())
            received = self.receive("reply")
        self._take(received)
        return welcome

    def contribute(self) -> None:
        self.send(*contribution(self.seq + 1, self.version))

    def reply(self) -> str:
        received = self.receive("reply")
        self._take(received)
        return str(pb.Reply.Outcome.Name(received.header.result.outcome))

    def _take(self, received: Any) -> None:
        left = received.header.weights.num_bytes - len(received.data)
        while left > 0:
            left -= len(self.receive(None).data)
        self.seq, self.version = received.header.result.seq, received.header.result.version

    def ended(self) -> tuple[str, str, str]:
        """(status, ps-reason, text) of a stream that the server ends."""
        try:
            for raw in self._call:
                received = parse(pb.ServerMessage, raw)
                if received.kind == "waiting" and received.header.reason.endswith(" to finish"):
                    return "OK", "", ""  # it has said Finish, and others train on: the server is right to wait
        except grpc.RpcError as error:
            metadata = dict(error.trailing_metadata() or ())
            return error.code().name, str(metadata.get("ps-reason", "")), error.details() or ""
        return "OK", "", ""

    def hang_up(self) -> None:
        """Nothing more will be said; the stream stays open until the server ends it."""
        self._outgoing.put(None)

    def close(self) -> None:
        self.hang_up()
        self._call.cancel()
        self._channel.close()


class DirectPeer(Peer):
    """The same over a direct connection, from the Model on; `raw` writes bytes there as they are."""

    def __init__(self, address: str, rank: int | None = None) -> None:
        super().__init__(address, rank)
        self.socket: socket.socket | None = None  # None also of one that the server would not let in
        self._offered: pb.Direct | None = None  # by the welcome
        self._host = address.rpartition(":")[0]
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def send(self, *raws: bytes) -> None:
        for raw in raws:
            if self.socket is not None:
                self._outbox.put(struct.pack("<I", len(raw)) + raw)
            elif raw.startswith(_MODEL_TAG) and (raw := self._connect(raw)):
                super().send(raw)
            else:
                super().send(raw)

    @property
    def is_direct(self) -> bool:  # type: ignore[override]
        return self.socket is not None

    def raw(self, data: bytes) -> None:
        self._outbox.put(data)

    def _connect(self, raw: bytes) -> bytes:
        """With the ticket of the welcome, where there has been one."""
        if self._offered is None:
            try:
                self.receive("welcome")
            except (grpc.RpcError, StopIteration, AssertionError):
                return raw
        offered: Any = self._offered
        connection = socket.create_connection((self._host, offered.port), timeout=DEADLINE_S)
        taken = b""
        with contextlib.suppress(OSError):
            connection.sendall(HELLO + offered.ticket)
            taken = connection.recv(1)
        if taken != ACCEPTED:  # what was said before has ended the stream
            connection.close()
            return raw
        self.socket, self._file = connection, connection.makefile("rb")
        threading.Thread(target=self._write, daemon=True).start()
        return raw + _IS_DIRECT if raw == model_bytes() else raw

    def _write(self) -> None:
        assert self.socket is not None
        with contextlib.suppress(OSError):
            while (data := self._outbox.get()) is not None:
                self.socket.sendall(data)
            self.socket.shutdown(socket.SHUT_WR)

    def receive(self, *kinds: str | None) -> Any:
        if self.socket is None:
            received = super().receive(*kinds)
            if received.kind == "welcome":
                self._offered = received.header.direct
            return received
        while True:
            received = self._next()
            assert received is not None, "the direct connection was closed"
            if received.kind in kinds:
                return received
            assert received.kind == "waiting", received

    def _next(self) -> Any:
        """The next message with the bytes that follow it; None at the end, also at one in the middle of a message."""
        try:
            if len(prefix := self._file.read(4)) < 4:
                return None
            (length,) = struct.unpack("<I", prefix)
            if len(raw := self._file.read(length)) < length:
                return None
            received = parse(pb.ServerMessage, raw)
            data = memoryview(self._file.read(received.out_of_band)) if received.out_of_band else received.data
        except OSError:
            return None
        if len(data) < received.out_of_band:
            return None
        return received._replace(data=data, out_of_band=0)

    def ended(self) -> tuple[str, str, str]:
        while self.socket is not None and (received := self._next()) is not None:
            if received.kind == "waiting" and received.header.reason.endswith(" to finish"):
                return "OK", "", ""
        return super().ended()

    def hang_up(self) -> None:
        super().hang_up()
        self._outbox.put(None)

    def close(self) -> None:
        super().close()
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
            self.socket.close()


class RawPeer:
    """One HTTP/2 connection made by hand. Replies pings; without `room` it never lets the server send more than
    HTTP/2's first 64 KiB."""

    def __init__(self, address: str, room: bool = True) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        window = struct.pack(">HI", 4, (1 << 31) - 1 if room else (1 << 16) - 1)
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _http2(4, 0, 0, window))
        if room:
            self._socket.sendall(_http2(8, 0, 0, struct.pack(">I", 1 << 30)))
        self.has_ended = threading.Event()  # the stream, or all of the connection
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, method: str) -> None:
        headers = (
            (":method", "POST"), (":scheme", "http"), (":path", f"/{SERVICE}/{method}"), (":authority", "hostile"),
            ("te", "trailers"), ("content-type", "application/grpc"),
        )  # fmt: skip
        block = b"".join(b"\x10" + _text(name) + _text(value) for name, value in headers)
        self._socket.sendall(_http2(1, 4, 1, block))

    def message(self, raw: bytes, num_announced: int | None = None) -> None:
        """A gRPC message, or the beginning of one of `num_announced` bytes."""
        data = struct.pack(">BI", 0, len(raw) if num_announced is None else num_announced) + raw
        for at in range(0, len(data), 16_384):
            self._socket.sendall(_http2(0, 0, 1, data[at : at + 16_384]))

    def garbage(self, data: bytes) -> None:
        self._socket.sendall(data)

    def more(self, data: bytes) -> None:
        self._socket.sendall(_http2(0, 0, 1, data))

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as file:
                while len(head := file.read(9)) == 9:
                    payload = file.read(int.from_bytes(head[:3], "big"))
                    if head[3] == 6 and not head[4] & 1:
                        self._socket.sendall(_http2(6, 1, 0, payload))
                    elif head[3] == 4 and not head[4] & 1:
                        self._socket.sendall(_http2(4, 1, 0, b""))
                    elif head[3] == 3 or (head[3] == 1 and head[4] & 1):
                        self.has_ended.set()
        except OSError:
            pass
        self.has_ended.set()

    def close(self) -> None:
        self._socket.close()


def _http2(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _text(text: str) -> bytes:
    assert len(text) < 127
    return bytes([len(text)]) + text.encode()


# ---- what a well-behaved worker says ---------------------------------------------------------------


def join_bytes(rank: int | None = None) -> bytes:
    return frame(pb.WorkerMessage(join=pb.Join(rank=-1 if rank is None else rank, host="here", process=f"p{rank}")))


def model_bytes(layout: Layout = LAYOUT, **fields: Any) -> bytes:
    spec = OptimizerSpec("SGD", (GroupSpec(("w",), {"lr": 0.5}),))
    values = {"tensors": layout_to_proto(layout), "fingerprint": layout.fingerprint, **fields}
    return frame(pb.WorkerMessage(model=pb.Model(optimizer=optimizer_to_proto(spec), **values)))


def initial_weights(layout: Layout = LAYOUT) -> Iterable[bytes]:
    header = pb.WorkerMessage(initial_weights=pb.InitialWeights(payload_bytes=layout.total_bytes))
    return message_frames(header, [memoryview(bytes(layout.total_bytes))])


def contribution_header(seq: int, version: int = 0, layout: Layout = LAYOUT, **fields: Any) -> pb.WorkerMessage:
    values = {
        "seq": seq, "version": version, "num_samples": 1, "wants_weights": True,
        "num_bytes": layout.exchange_bytes, **fields,
    }  # fmt: skip
    return pb.WorkerMessage(contribution=contribution_proto(**values))


def contribution(seq: int, version: int = 0, layout: Layout = LAYOUT) -> Iterable[bytes]:
    return message_frames(contribution_header(seq, version, layout), [memoryview(bytes(layout.exchange_bytes))])


def begin_bytes() -> bytes:
    return frame(pb.WorkerMessage(begin=pb.Begin(num_bytes=LAYOUT.exchange_bytes)))


# ---- the server --------------------------------------------------------------------------------------


class Server:
    """ps-server as a process; whoever connects through it is closed with it."""

    def __init__(self, cluster: Cluster, *flags: str) -> None:
        self._process = cluster.server(*flags)
        self.popen, self.events, self.until = self._process.popen, self._process.events, self._process.until
        self.address = cluster.address
        self.transport = "grpc"  # of its peers
        self._peers: list[Any] = []

    @property
    def output(self) -> str:
        return self._process.output

    def until_event(self, name: str, **fields: Any) -> None:
        """Until there is an event of this name with these fields."""
        self.until(lambda: any(fields.items() <= event.items() for event in self.events(name)), f"{name} {fields}")

    def peer(self, rank: int | None = None) -> Peer:
        """Over the transport of the test."""
        kind = DirectPeer if self.transport == "direct" else Peer
        self._peers.append(kind(self.address, rank))
        return self._peers[-1]  # type: ignore[no-any-return]

    def raw_peer(self, room: bool = True) -> RawPeer:
        self._peers.append(RawPeer(self.address, room))
        return self._peers[-1]  # type: ignore[no-any-return]

    @property
    def rss_bytes(self) -> int:
        """Memory of its own; shared pages are the workers' and the weights'."""
        _, resident, shared, *_ = Path(f"/proc/{self.popen.pid}/statm").read_text().split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")

    def check_is_well(self, rank: int) -> None:
        """It serves a well-behaved worker over the transport of the test, and nothing unexpected has happened inside
        it."""
        peer = self.peer(rank)
        peer.join()
        assert peer.is_direct == (self.transport == "direct"), self.output
        peer.contribute()
        assert peer.reply() == "APPLIED"
        peer.close()
        assert "Traceback" not in self.output, self.output
        assert not self.events("internal_error"), self.events("internal_error")

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests: any number of workers, none of whom waits for another, and short deadlines."""
    flags = (
        "--mode", "async", "--steps", "1000000", "--set", "limits.progress_s=1.5", "--set", "server.direct=true",
        "--set", "server.join_timeout_s=3",
    )  # fmt: skip
    cluster = Cluster(tmp_path_factory.mktemp("hostile"))
    server = Server(cluster, *flags)
    yield server
    server.close()
    cluster.stop()


@pytest.fixture
def server(running: Server, request: pytest.FixtureRequest) -> Iterator[Server]:
    """Whose peers go over the transport that is the parameter, if there is one."""
    running.transport = getattr(request, "param", "grpc")
    yield running
    running.transport = "grpc"


@pytest.fixture
def start_server(cluster: Cluster) -> Iterator[Callable[..., Server]]:
    """A server of the test's own, with these flags."""
    started: list[Server] = []

    def start(*flags: str) -> Server:
        started.append(Server(cluster, *flags))
        return started[-1]

    yield start
    for server in started:
        server.close()
