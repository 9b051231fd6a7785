"""A worker's own exchange with a server that says what it is told to say: all but gRPC is real."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from paramserver.common.config.schema import WorkerConfig
from paramserver.common.errors import ParamServerError
from paramserver.common.tensors.layout import as_bytes, new_payload
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec, TableSpec, check_arguments
from paramserver.common.wire.frames import message_frames
from paramserver.common.wire.protocol import layout_to_proto
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.worker.conversation import channel, exchange
from paramserver.worker.conversation.channel import Lost
from paramserver.worker.conversation.exchange import Exchange
from paramserver.worker.conversation.messages import Outgoing, read_settings
from paramserver.worker.tensors.transfer import ModelTensors
from paramserver.worker.training.tasks.loading import check_named_by_server

from ..records import contribution_of, reply_proto
from .hostile import Hostile
from .lying import settings, welcome

CONFIG = WorkerConfig(server="127.0.0.1:1", rank=0, give_up_s=1e-9, transports=("shared", "grpc"))
ROWS = TableSpec("rows", 100, 4, "float32", 0.1, "SGD", {"lr": 0.1}, 0, 100)
WORK = Outgoing(contribution_of(1, loss=0.5, compute_s=0.1))
REFUSED = (ParamServerError, Lost)


class Channel:
    """In gRPC's place: each call gets its reply with these bytes."""

    def __init__(self, script: list[bytes]) -> None:
        self._script = script

    def stream_stream(self, _: str, **__: Any) -> Callable[..., Any]:
        return lambda *_, **__: _Call(self._script)

    def unary_stream(self, _: str, **__: Any) -> Callable[..., Any]:
        return lambda *_, **__: _Call(self._script)

    def unary_unary(self, _: str, response_deserializer: Callable[[bytes], Any], **__: Any) -> Any:
        return _Unary(lambda: response_deserializer(self._script.pop(0)))

    def close(self) -> None:
        pass


class _Call:
    def __init__(self, script: list[bytes]) -> None:
        self._script = script

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if not self._script:
            raise StopIteration
        return self._script.pop(0)

    def cancel(self) -> None:
        pass

    def add_callback(self, _: object) -> None:
        pass


class _Unary:
    def __init__(self, result: Callable[[], Any]) -> None:
        self.result = result

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self.result()

    def future(self, *_: Any, **__: Any) -> _Unary:
        return self


class WorkerEnd:
    """Takes one hostile message after another, each at a place of a conversation of its own."""

    def __init__(self) -> None:
        self.num_refused = 0
        self._model = ModelTensors(nn.Linear(3, 2))
        self._optimizer = OptimizerSpec("SGD", (GroupSpec(tuple(self._model.names.values()), {"lr": 0.1}),))
        self._script: list[bytes] = []
        self._patches = [
            mock.patch.object(channel, "open_channel", self._channel),
            mock.patch.object(channel.Channel, "connect"),
            mock.patch.object(channel.Heartbeat, "start"),
        ]

    def _channel(self, *_: object) -> Channel:
        return Channel(self._script)

    def __enter__(self) -> WorkerEnd:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def deliver(self, hostile: Hostile) -> None:
        position = hostile.random.choice((
            self._welcome, self._settings, self._start, self._reply, self._final, self._pull, self._pull_optimizer,
            self._rows, self._status, self._heartbeat,
        ))  # fmt: skip
        try:
            position(hostile)
        except REFUSED:
            self.num_refused += 1

    # ---- what is said ---------------------------------------------------------------------------------

    def _say(self, hostile: Hostile, message: pb.ServerMessage, payload: int | None = None) -> None:
        """Spoiled, or its bytes changed, or after some other message; then a payload, spoiled or not."""
        way = hostile.random.random()
        if way < 0.15:
            other = pb.ServerMessage()
            hostile.fill(other)
            self._script.append(other.SerializeToString())
        if way < 0.75:
            hostile.spoil(getattr(message, str(message.WhichOneof("kind"))))
        frames = list(self._frames(message, payload))
        if way > 0.6:
            at = hostile.random.randrange(len(frames))
            frames[at] = hostile.mutate(frames[at], frames)
        self._script += frames

    def _frames(self, message: pb.ServerMessage, num_bytes: int | None) -> Iterable[bytes]:
        if num_bytes is None:
            return [message.SerializeToString()]
        return map(bytes, message_frames(message, [as_bytes(new_payload(num_bytes))]))

    @property
    def _bytes(self) -> int:
        return self._model.layout.exchange_bytes

    def _make_reply(self, outcome: int, **fields: Any) -> pb.ServerMessage:
        ordinary = {"local_steps": 1, "num_workers": 1, "num_bytes": self._bytes, "version": 1, "reason": "so"}
        return pb.ServerMessage(reply=reply_proto(outcome, **(ordinary | fields)))

    def _joined(self, *then: bytes) -> Exchange:
        """With a welcome that is sound."""
        self._script[:] = [pb.ServerMessage(welcome=welcome()).SerializeToString(), *then]
        return Exchange(CONFIG, 0)

    def _begun(self) -> Exchange:
        found = self._joined(*self._frames(self._make_reply(pb.Reply.START), self._bytes))
        found.start(self._model, self._optimizer)
        return found

    # ---- places -------------------------------------------------------------------------------------------

    def _welcome(self, hostile: Hostile) -> None:
        self._script.clear()
        self._say(hostile, pb.ServerMessage(welcome=welcome()))
        self._script += self._frames(self._make_reply(pb.Reply.START), self._bytes)
        found = Exchange(CONFIG, 0)
        try:
            found.start(self._model, self._optimizer)
        finally:
            found.drop()

    def _settings(self, hostile: Hostile) -> None:
        """And what a worker makes of them that was given no task."""
        run_settings = settings()
        hostile.spoil(run_settings)
        found = read_settings(run_settings)
        check_named_by_server(found.task, found.task_args or {}, {})
        check_arguments(found.optimizer, found.optimizer_args or {})

    def _start(self, hostile: Hostile) -> None:
        found = self._joined()
        if hostile.random.random() < 0.3:
            state = pb.State(num_bytes=8, piece=bytes(8))
            self._say(hostile, pb.ServerMessage(state=state))
        self._say(hostile, self._make_reply(pb.Reply.START, position=pb.Position(step=1)), self._bytes)
        try:
            found.start(self._model, self._optimizer)
        finally:
            found.drop()

    def _reply(self, hostile: Hostile) -> None:
        found = self._begun()
        if hostile.random.random() < 0.2:
            self._script.append(pb.ServerMessage(waiting=pb.Waiting(reason="\x1b[31m" * 2000)).SerializeToString())
        outcome = hostile.random.choice(list(pb.Reply.Outcome.values())[2:])
        self._say(hostile, self._make_reply(outcome, seq=1, version=2, num_batches=1), self._bytes)
        try:
            found.contribute(WORK)
        finally:
            found.drop()

    def _final(self, hostile: Hostile) -> None:
        found = self._begun()
        self._say(
            hostile,
            pb.ServerMessage(final=pb.Final(version=1, weights=pb.WeightsInfo(num_bytes=self._bytes))),
            self._bytes,
        )
        try:
            found.finish()
        finally:
            found.drop()

    def _snapshot(self, num_bytes: int) -> pb.ServerMessage:
        snapshot = pb.Snapshot(
            run="run", version=1, payload_bytes=num_bytes, tensors=layout_to_proto(self._model.layout)
        )
        return pb.ServerMessage(snapshot=snapshot)

    def _pull(self, hostile: Hostile) -> None:
        found, num_bytes = self._begun(), self._model.layout.total_bytes
        self._say(hostile, self._snapshot(num_bytes), num_bytes)
        try:
            if hostile.random.random() < 0.5:
                found.pull_averaged(self._model)
            else:
                exchange.pull_newest([found.shards.first.channel], self._model)
        finally:
            found.drop()

    def _pull_optimizer(self, hostile: Hostile) -> None:
        found = self._begun()
        self._say(hostile, self._snapshot(64), 64)
        try:
            found.pull_optimizer()
        finally:
            found.drop()

    def _rows(self, hostile: Hostile) -> None:
        found = self._begun()
        shard = found.shards.first
        shard.tables = (ROWS,)
        reply = pb.RowsReply(rows=bytes(2 * ROWS.row_bytes))
        if hostile.random.random() < 0.7:
            hostile.spoil(reply)
        self._script.append(reply.SerializeToString())
        try:
            shard.pull_rows(0, torch.tensor([3, 5]))()
            self._script.append(reply.SerializeToString())
            shard.channel.shard_addresses("run")
        finally:
            found.drop()

    def _status(self, hostile: Hostile) -> None:
        found = self._begun()
        reply = pb.StatusReply(run="run", settings=settings(), version=1, step=1)
        hostile.spoil(reply)
        self._script.append(reply.SerializeToString())
        try:
            read_settings(found.shards.first.channel.status().settings)
        finally:
            found.drop()

    def _heartbeat(self, hostile: Hostile) -> None:
        found = self._begun()
        heartbeat_reply = pb.HeartbeatReply(lease_s=1.0, server_incarnation=1)
        hostile.spoil(heartbeat_reply)
        found.group_view.heartbeat_replied(1, heartbeat_reply)
        found.group_view.is_over(1)
        found.drop()
