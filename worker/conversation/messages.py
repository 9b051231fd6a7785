"""What the worker's larger messages are made of, and the settings that a welcome brings. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from pydantic import ValidationError

from ...common.config.conditions import every
from ...common.config.schema import TrainConfig
from ...common.errors import Reason, UsageError, refusal, shown
from ...common.kinds import ContributionKind
from ...common.tensors.layout import Layout, as_bytes
from ...common.tensors.optimizers import OptimizerSpec, TableSpec
from ...common.version import PROGRAM_VERSION
from ...common.wire.checks import check_header
from ...common.wire.frames import CHUNK_BYTES, INLINE_BYTES, frame, payload_frames
from ...common.wire.protocol import from_struct, layout_to_proto, optimizer_from_proto, optimizer_to_proto
from ...common.wire.records import Contribution, Position
from ...proto import parameter_server_pb2 as pb
from ..session import Progress
from ..tensors.overlap import RULES, Merge

# What the server says, as the proto has it.
Welcome = pb.Welcome
Final = pb.Final
ReplyMessage = pb.Reply
HeartbeatReply = pb.HeartbeatReply
Waiting = pb.Waiting
State = pb.State
SharedMemory = pb.SharedMemory
KindOfRun = pb.RunSettings.ContributionKind


@dataclass(frozen=True)
class Settings:
    """What the server decides for every worker (RunSettings in the proto)."""

    mode: str
    kind: ContributionKind
    num_workers: int  # 0: any number
    steps: int | None  # None: nobody has set them
    batch_size: int
    seed: int
    task: str = ""
    task_args: dict[str, Any] | None = None
    optimizer: str = "sgd"
    optimizer_args: dict[str, Any] | None = None
    polyak: float = 0.0
    delayed_update: bool = False
    fragments: int = 1  # of the parameters, of which one is exchanged at a time
    outstanding: int = 0  # means of gradients that a worker goes on without, where workers average among themselves
    union_batch: bool = False  # a version is a step along the gradients of all workers, as one process takes it
    merge: Merge = field(default_factory=Merge)  # where deltas are exchanged and `delayed_update`
    train: TrainConfig = field(default_factory=TrainConfig)
    epochs: int | None = None  # instead of steps
    eval_every: str | None = None
    ends_by_metrics: bool = False


class Begun(NamedTuple):
    """Where a rank was when a contribution began, and what its script remembered then (State in the proto)."""

    position: Position
    payload: bytes


class RowGradients(NamedTuple):
    """Of one table: ids, int64 [n], distinct and ascending, and gradients [n, dim]."""

    table: int
    ids: torch.Tensor
    gradients: torch.Tensor


class Outgoing(NamedTuple):
    """A contribution with what travels beside it."""

    contribution: Contribution
    state: bytes | None = None  # that the script remembered when it began
    rows: tuple[RowGradients, ...] = ()
    # What the optimizer remembers, by parameter and key; or, said to a shard, its part, by `<key>/<parameter>`.
    optimizer: Mapping[str, Any] | None = None

    def changed(self, **topics: Any) -> Outgoing:
        """With other topics of the contribution."""
        return self._replace(contribution=replace(self.contribution, **topics))


class Goodbye(NamedTuple):
    """What a worker says of itself when it goes (Leave in the proto)."""

    metrics: dict[str, float]  # of the final evaluation
    finished: bool = False
    failure: str = ""
    exit_code: int = 0


def message(**kind: Any) -> list[bytes]:
    """A message of one kind, without a payload: `message(leave={...})`, the fields of Leave."""
    return [frame(pb.WorkerMessage(**kind))]


def join_message(progress: Progress, host: str, pid: int, device: str, seated: Welcome | None = None) -> pb.Join:
    """`seated`: the coordinator's welcome, shown to another shard. Without what the transport says
    (`replies_taken`)."""
    join = pb.Join(
        run=progress.run,
        rank=-1 if progress.rank is None else progress.rank,
        incarnation=progress.incarnation,
        host=host,
        pid=pid,
        device=device,
        program_version=PROGRAM_VERSION,
        server_incarnation=progress.server_incarnation,
        process=progress.process,
    )
    if seated is not None:
        join.seated, join.resumed, join.server_incarnation = True, seated.resumed, seated.server_incarnation
    return join


def heartbeat_bytes(progress: Progress) -> bytes:
    return pb.HeartbeatRequest(run=progress.run, rank=progress.rank or 0, process=progress.process).SerializeToString()


def evaluator_heartbeat(process: str, metrics: dict[str, Any] | None) -> bytes:
    """Of a process that evaluates; `metrics`: the fields of EvaluationMetrics."""
    heartbeat = pb.HeartbeatRequest(process=process, evaluates=True)
    if metrics is not None:
        heartbeat.metrics.MergeFrom(pb.EvaluationMetrics(**metrics))
    return heartbeat.SerializeToString()


def model_message(layout: Layout, optimizer: OptimizerSpec, codecs: Sequence[str], reply_codec: str) -> pb.Model:
    """Without what a transport has to offer. `codecs`: those that contributions may come in."""
    return pb.Model(
        tensors=layout_to_proto(layout),
        fingerprint=layout.fingerprint,
        optimizer=optimizer_to_proto(optimizer),
        codecs=[name for name in codecs if name != "raw"],
        reply_codec="" if reply_codec == "raw" else reply_codec,
    )


def initial_weights_frames(pieces: Iterable[memoryview], num_bytes: int) -> Iterator[bytes]:
    header = pb.WorkerMessage(initial_weights=pb.InitialWeights(payload_bytes=num_bytes))
    if num_bytes <= INLINE_BYTES:
        return iter([frame(header, 0, pieces)])
    return chain([frame(header)], payload_frames(pieces))


def state_frames(payload: bytes, kind: Literal["state", "optimizer"] = "state") -> Iterator[bytes]:
    for offset in range(0, len(payload), CHUNK_BYTES):
        piece = pb.State(num_bytes=len(payload), offset=offset, piece=payload[offset : offset + CHUNK_BYTES])
        yield frame(pb.WorkerMessage(state=piece) if kind == "state" else pb.WorkerMessage(optimizer=piece))


def rows_frames(tables: Sequence[TableSpec], rows: Sequence[RowGradients]) -> Iterator[bytes]:
    """What a contribution has for the `tables` of one shard, ahead of it."""
    for table, ids, gradients in rows:
        spec = tables[table]
        first, end = torch.searchsorted(ids, torch.tensor([spec.first, spec.end])).tolist()
        for here in chunks(first, end, gradients.shape[1] * gradients.element_size()):
            pieces = [as_bytes(ids[here]), as_bytes(gradients[here])]
            header = pb.Rows(table=table, count=here.stop - here.start)
            yield frame(pb.WorkerMessage(rows=header), 0, pieces)


def chunks(first: int, end: int, row_bytes: int) -> Iterator[slice]:
    """Rows [first, end) in messages of about CHUNK_BYTES, ids included."""
    step = max(1, CHUNK_BYTES // (row_bytes + 8))
    for start in range(first, end, step):
        yield slice(start, min(end, start + step))


_KINDS = {
    pb.RunSettings.GRADIENT: ContributionKind.GRADIENT,
    pb.RunSettings.WEIGHTS: ContributionKind.WEIGHTS,
    pb.RunSettings.DELTA: ContributionKind.DELTA,
    pb.RunSettings.COMPLETION: ContributionKind.COMPLETION,
    pb.RunSettings.DELTA_OF_FRAGMENT: ContributionKind.DELTA,
    pb.RunSettings.DELTA_OVERLAPPED: ContributionKind.DELTA,
}


def settings_from(told: bytes) -> Settings:
    """Of `Exchange.told_settings`, in another process of the same worker."""
    return read_settings(pb.RunSettings.FromString(told))


def read_settings(message: pb.RunSettings) -> Settings:
    """Raises UsageError for a run that this worker cannot take part in, a BAD_REQUEST refusal for what is none."""
    check_header(message)
    if message.contribution not in _KINDS:
        raise UsageError(
            f"mode {message.mode} wants contributions of kind {message.contribution}, which this worker does not know",
            fix="install the same version of paramserver on both",
        )
    if message.merge and message.merge not in RULES:
        raise UsageError(
            f"policy.merge is {message.merge}, a rule that this worker does not know",
            fix="install the same version of paramserver on both",
        )
    if message.eval_every:
        try:
            every(message.eval_every)
        except ValueError as error:
            raise refusal(Reason.BAD_REQUEST, f"RunSettings.eval_every: {error}") from None
    optimizer = optimizer_from_proto(message.optimizer)
    arguments = optimizer.groups[0].hyperparameters if optimizer.groups else {}
    return Settings(
        mode=message.mode,
        kind=_KINDS[message.contribution],
        num_workers=message.num_workers,
        steps=message.steps or None,
        epochs=message.epochs or None,
        eval_every=message.eval_every or None,
        ends_by_metrics=message.ends_by_metrics,
        batch_size=message.batch_size,
        seed=message.seed,
        task=message.task,
        task_args=_whole_numbers(from_struct(message.task_args)),
        optimizer=optimizer.name,
        optimizer_args=arguments,
        polyak=message.polyak,
        delayed_update=message.delayed_update,
        fragments=max(1, message.fragments),
        outstanding=message.outstanding,
        union_batch=message.union_batch,
        merge=Merge(message.merge or "shift", message.merge_alpha, message.overlap_steps),
        train=_train_settings(_whole_numbers(from_struct(message.train))),
    )


def _train_settings(told: dict[str, Any]) -> TrainConfig:
    try:
        return TrainConfig.model_validate(told)
    except ValidationError as error:
        what = "; ".join(
            f"train.{shown('.'.join(map(str, item['loc'])))}: {item['msg']}" for item in error.errors()[:5]
        )
        raise UsageError(
            f"the server asks for training that this worker does not know ({what})",
            fix="install the same version of paramserver on both",
        ) from None


def _whole_numbers(value: Any) -> Any:
    """Struct knows one kind of number; where a whole one was meant, give an int back."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    return value
