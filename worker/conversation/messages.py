"""Builds the worker's larger messages, and reads the settings in a Welcome."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import torch
from pydantic import ValidationError

from ...common.config.conditions import every
from ...common.config.schema import TrainConfig, WorkerConfig
from ...common.errors import UsageError, bad_request, shown
from ...common.kinds import ContributionKind
from ...common.tensors.layout import Layout, as_bytes
from ...common.tensors.optimizers import OptimizerSpec, TableSpec
from ...common.version import PROGRAM_VERSION
from ...common.wire.checks import check_header, from_struct
from ...common.wire.frames import CHUNK_BYTES, frame
from ...common.wire.protocol import layout_to_proto, optimizer_from_proto, optimizer_to_proto
from ...common.wire.records import Contribution, Position, changed
from ...proto import parameter_server_pb2 as pb
from ..session import Progress

# Names for messages of which other modules know the fields.
Welcome = pb.Welcome
Final = pb.Final
Goodbye = pb.Leave
HeartbeatRequest = pb.HeartbeatRequest
HeartbeatReply = pb.HeartbeatReply
ReplyMessage = pb.Reply
Snapshot = pb.Snapshot
StatusReply = pb.StatusReply


@dataclass(frozen=True)
class Settings:
    """The run's settings, equal for all workers (RunSettings in the proto)."""

    mode: str
    kind: ContributionKind
    num_workers: int  # 0: any number
    steps: int | None  # None: not set
    batch_size: int
    seed: int
    task: str = ""
    task_args: dict[str, Any] | None = None
    optimizer: str = "sgd"
    optimizer_args: dict[str, Any] | None = None
    polyak: float = 0.0
    delayed_update: bool = False
    fragments: int = 1  # parts of the parameters that are exchanged in turn
    outstanding: int = 0  # mean gradients that an all-reduce peer may go on without
    union_batch: bool = False  # a version is one step along the mean of all workers' gradients
    in_region: bool = False  # the server is a relay
    overlap_steps: int = 0  # local steps during an exchange of deltas; 0: all up to the next contribution
    train: TrainConfig = field(default_factory=TrainConfig)
    epochs: int | None = None  # used instead of `steps`
    eval_every: str | None = None
    ends_by_metrics: bool = False


class Begun(NamedTuple):
    """A rank's position at the beginning of a contribution, and its script's state (State in the proto)."""

    position: Position
    payload: bytes


class RowGradients(NamedTuple):
    """Gradients of one table: distinct and ascending ids, int64 [n], and gradients [n, dim]."""

    table: int
    ids: torch.Tensor
    gradients: torch.Tensor


class Outgoing(NamedTuple):
    """A contribution and the payloads that travel with it."""

    contribution: Contribution
    state: bytes | None = None  # of the script at the beginning of the contribution
    rows: tuple[RowGradients, ...] = ()
    optimizer: Mapping[str, Mapping[str, torch.Tensor]] | None = None  # its state, by parameter and key

    def changed(self, **topics: Any) -> Outgoing:
        """A copy with other topics of the contribution."""
        return self._replace(contribution=changed(self.contribution, **topics))


def message(**kind: Any) -> list[bytes]:
    """A message of one kind without a payload, such as `message(leave={...})` with the fields of Leave."""
    return [frame(pb.WorkerMessage(**kind))]


def join_message(
    progress: Progress, device: str, joins_as: Mapping[str, Any], seated: Welcome | None = None
) -> pb.Join:
    """A Join. `joins_as`: further fields; `seated`: the coordinator's welcome, in a Join for another shard.

    A worker that has not begun belongs to no run yet: it may join another that a restarted server begins.
    """
    return pb.Join(
        run=progress.run if progress.num_starts or seated is not None else "",
        rank=-1 if progress.rank is None else progress.rank,
        incarnation=progress.incarnation,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=device,
        program_version=PROGRAM_VERSION,
        server_incarnation=(seated or progress).server_incarnation,
        process=progress.process,
        seated=seated is not None,
        resumed=seated is not None and seated.resumed,
        **joins_as,
    )


def model_message(layout: Layout, optimizer: OptimizerSpec, codec: str, reply_codec: str) -> pb.Model:
    """The Model message, without a transport's offer. `codec`: that of contributions."""
    return pb.Model(
        tensors=layout_to_proto(layout),
        fingerprint=layout.fingerprint,
        optimizer=optimizer_to_proto(optimizer),
        codecs=[] if codec == "raw" else [codec],
        reply_codec="" if reply_codec == "raw" else reply_codec,
    )


def state_frames(payload: bytes, kind: Literal["state", "optimizer"] = "state") -> Iterator[bytes]:
    for offset in range(0, len(payload), CHUNK_BYTES):
        piece = pb.State(num_bytes=len(payload), offset=offset, piece=payload[offset : offset + CHUNK_BYTES])
        yield frame(pb.WorkerMessage(state=piece) if kind == "state" else pb.WorkerMessage(optimizer=piece))


def rows_frames(tables: Sequence[TableSpec], rows: Sequence[RowGradients]) -> Iterator[bytes]:
    """The gradients for the `tables` of one shard, which precede their contribution.

    A table whose rows are all on other shards has an empty message: its optimizer counts the step on every shard.
    """
    for table, ids, gradients in rows:
        spec = tables[table]
        first, end = torch.searchsorted(ids, torch.tensor([spec.first, spec.end], device="cpu")).tolist()
        if first == end:
            yield frame(pb.WorkerMessage(rows=pb.Rows(table=table)))
        for here in chunks(first, end, gradients.shape[1] * gradients.element_size()):
            pieces = [as_bytes(ids[here]), as_bytes(gradients[here])]
            header = pb.Rows(table=table, count=here.stop - here.start)
            yield frame(pb.WorkerMessage(rows=header), 0, pieces)


def chunks(first: int, end: int, row_bytes: int) -> Iterator[slice]:
    """Split rows [first, end) into messages of about CHUNK_BYTES, ids included."""
    step = max(1, CHUNK_BYTES // (row_bytes + 8))
    for start in range(first, end, step):
        yield slice(start, min(end, start + step))


_KINDS = {pb.RunSettings.ContributionKind.Value(kind.name): kind for kind in ContributionKind}
_KINDS |= dict.fromkeys((pb.RunSettings.DELTA_OF_FRAGMENT, pb.RunSettings.DELTA_OVERLAPPED), ContributionKind.DELTA)


def settings_from(payload: bytes) -> Settings:
    """Read the settings of a Welcome in another process of the replica group."""
    return read_settings(pb.RunSettings.FromString(payload))


def loses_replies(worker: WorkerConfig, settings: Settings) -> bool:
    """Whether this worker gets weights in a lossy codec."""
    return worker.reply_codec != "raw" and settings.kind.has_payload


def read_settings(message: pb.RunSettings) -> Settings:
    """Read the run's settings.

    Raises UsageError for a run that this worker cannot take part in, and a BAD_REQUEST refusal for an invalid message.
    """
    check_header(message)
    if message.contribution not in _KINDS:
        raise UsageError(
            f"mode {message.mode} needs contributions of kind {message.contribution}, which this worker does not know",
            fix="install the same version of paramserver on both",
        )
    if message.eval_every:
        try:
            every(message.eval_every)
        except ValueError as error:
            raise bad_request(f"RunSettings.eval_every: {error}") from None
    try:
        train = TrainConfig.model_validate(_whole_numbers(from_struct(message.train)))
    except ValidationError as error:
        problems = "; ".join(
            f"train.{shown('.'.join(map(str, item['loc'])))}: {item['msg']}" for item in error.errors()[:5]
        )
        raise UsageError(
            f"the server's train settings are unknown to this worker ({problems})",
            fix="install the same version of paramserver on both",
        ) from None
    optimizer = optimizer_from_proto(message.optimizer)
    arguments = optimizer.groups[0].hyperparameters if optimizer.groups else {}
    names = [item.name for item in fields(Settings) if item.name in message.DESCRIPTOR.fields_by_name]
    values = {name: getattr(message, name) for name in names}
    values |= {name: values[name] or None for name in ("steps", "epochs", "eval_every")}
    values |= {"kind": _KINDS[message.contribution], "fragments": max(1, message.fragments), "train": train}
    values |= {"optimizer": optimizer.name, "optimizer_args": arguments}
    return Settings(**values | {"task_args": _whole_numbers(from_struct(message.task_args))})


def _whole_numbers(value: Any) -> Any:
    """Turn whole floats into ints, because a protobuf Struct has only one number type."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    return value
