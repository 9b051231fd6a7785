"""Unary and pull calls to one server process, beside the stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import torch

from ...common.errors import Reason, refusal
from ...common.tensors.layout import Layout, as_bytes
from ...common.tensors.optimizers import TableSpec
from ...common.wire.checks import check_header
from ...common.wire.frames import Frame, PayloadReader
from ...common.wire.protocol import layout_from_proto
from ...proto import parameter_server_pb2 as pb
from .channel import Channel, Lost, collect, next_frame, translated
from .messages import chunks

# Pulls have no total limit, because 1 GB at 25 Mbit/s takes 320 s. This one is for the first message, which waits for
# the pulls of other workers.
_PULL_S = 300.0
_PULL_PROGRESS_S = 60.0  # between two messages of 1 MiB, which is 140 kbit/s
_STATUS_S = 2.0

Write = Callable[[int, memoryview], None]


class RpcClient:
    """Makes single calls. Methods raise Lost, or the refusal of the server."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def status(self) -> pb.StatusReply:
        """The run's status."""
        ask = self._channel.method(
            "unary_unary", "Status",
            request_serializer=pb.StatusRequest.SerializeToString,
            response_deserializer=pb.StatusReply.FromString,
        )  # fmt: skip
        try:
            reply: pb.StatusReply = ask(pb.StatusRequest(), timeout=_STATUS_S)
        except grpc.RpcError as error:
            raise translated(error) from None
        check_header(reply)
        return reply

    def heartbeat(self, heartbeats: Iterator[bytes]) -> Iterator[pb.HeartbeatReply]:
        """Send heartbeats. Yields the reply to each, in order."""
        call = self._channel.method("stream_stream", "Heartbeat", response_deserializer=pb.HeartbeatReply.FromString)
        try:
            yield from call(heartbeats)
        except (grpc.RpcError, ValueError) as error:  # the channel was closed
            raise Lost(f"{type(error).__name__}") from None

    # ---- weights and optimizer state ----------------------------------------------------------

    def pull(self, request: pb.PullRequest, write: Write, num_bytes: int | None = None) -> int:
        """Fetch weights and write them piece by piece. Returns their version.

        Refuses weights of another size than `num_bytes`.
        """

        def begin(announced: int) -> Write:
            if num_bytes is not None and announced != num_bytes:
                message = f"the server sends {announced} bytes of weights, this model has {num_bytes}"
                raise refusal(Reason.BAD_REQUEST, message)
            return write

        return self._pull(request, begin).version

    def pull_version(self, version: int | None, num_bytes: int, write: Write, reader: str) -> tuple[int, Layout]:
        """Fetch weights for an evaluation, or for a `reader`. Returns their version and layout.

        `version` None fetches the coordinator's newest version. Other shards are asked for that version. Weights of
        another size than `num_bytes` are not written.
        """
        request = pb.PullRequest(keep=not reader and version is None, reader=reader, version=version)
        snapshot = self._pull(request, lambda announced: write if announced == num_bytes else lambda _, __: None)
        return snapshot.version, layout_from_proto(snapshot.tensors)

    def pull_optimizer(self, most_bytes: int) -> bytes:
        """Fetch the state of the server's optimizer, as a safetensors file of at most `most_bytes`."""
        payload = bytearray()

        def begin(num_bytes: int) -> Write:
            if num_bytes > most_bytes:
                description = f"{num_bytes} bytes of an optimizer's state; of this model it has at most {most_bytes}"
                raise refusal(Reason.BAD_REQUEST, f"the server sends {description}")
            payload.extend(bytes(num_bytes))
            return lambda offset, data: payload.__setitem__(slice(offset, offset + len(data)), data)

        self._pull(pb.PullRequest(optimizer=True), begin)
        return bytes(payload)

    def _pull(self, request: pb.PullRequest, begin: Callable[[int], Write]) -> pb.Snapshot:
        serializer = pb.PullRequest.SerializeToString
        call = self._channel.method("unary_stream", "Pull", request_serializer=serializer)(request)
        with _Deadline(call) as deadline:

            def receive() -> Frame:
                return deadline.next_frame(self._channel)

            first = receive()
            if first.kind != "snapshot":
                got = first.kind or "a piece of a payload"
                raise refusal(Reason.BAD_REQUEST, f"the server sent {got}, expected snapshot")
            snapshot = first.of(pb.Snapshot)
            check_header(snapshot)
            collect(PayloadReader(snapshot.payload_bytes, begin(snapshot.payload_bytes)), first, receive)
        return snapshot

    # ---- tables of rows -----------------------------------------------------------------------

    def shard_addresses(self, run: str) -> list[str]:
        """The addresses of a coordinator's shards, as in its Welcome."""
        (reply,) = self._ask([pb.RowsRequest(run=run)])()
        check_header(reply)
        return list(reply.shards)

    def pull_rows(
        self, run: str, rank: int, spec: TableSpec, table: int, ids: torch.Tensor
    ) -> Callable[[], list[pb.RowsReply]]:
        """Request rows of a table. The returned function waits for them."""
        parts = [bytes(as_bytes(ids[here])) for here in chunks(0, len(ids), spec.row_bytes)]
        return self._ask([pb.RowsRequest(run=run, rank=rank, table=table, ids=part) for part in parts])

    def _ask(self, requests: list[pb.RowsRequest]) -> Callable[[], list[pb.RowsReply]]:
        calls = self._channel.future(
            "PullRows", requests, _PULL_S,
            request_serializer=pb.RowsRequest.SerializeToString, response_deserializer=pb.RowsReply.FromString,
        )  # fmt: skip

        def wait() -> list[pb.RowsReply]:
            try:
                return [call.result() for call in calls]
            except grpc.RpcError as error:
                raise translated(error) from None
            except grpc.FutureCancelledError:
                raise Lost("the connection was closed") from None

        return wait


class _Deadline:
    """Cancels a call without progress: after `_PULL_S` without a first message, then after `_PULL_PROGRESS_S`."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._until = time.monotonic() + _PULL_S
        self._is_over = threading.Event()
        self._is_late = False

    def __enter__(self) -> _Deadline:
        threading.Thread(target=self._watch, name="pull", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def next_frame(self, channel: Channel) -> Frame:
        try:
            received = next_frame(self._call, channel.limit)
        except Lost:
            if self._is_late:
                raise Lost(f"no more of the weights came for {_PULL_PROGRESS_S:g} s") from None
            raise
        self._until = time.monotonic() + _PULL_PROGRESS_S
        return received

    def _watch(self) -> None:
        while not self._is_over.wait(max(0.0, self._until - time.monotonic())):
            if time.monotonic() >= self._until:
                self._is_late = True
                self._call.cancel()
                return
