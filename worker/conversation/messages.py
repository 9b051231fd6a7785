"""What the worker's larger messages are made of, and the settings that a welcome brings. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from pydantic import ValidationError

from ...common.config.conditions import every
from ...common.config.schema import TrainConfig
from ...common.errors import Reason, UsageError, refusal, shown
from ...common.tensors.layout import Layout, as_bytes
from ...common.tensors.optimizers import Hyperparameters, OptimizerSpec, TableSpec
from ...common.version import PROGRAM_VERSION
from ...common.wire.checks import check_header
from ...common.wire.frames import CHUNK_BYTES, INLINE_BYTES, body_frames, frame
from ...common.wire.protocol import from_struct, layout_to_proto, optimizer_from_proto, optimizer_to_proto, struct
from ...proto import parameter_server_pb2 as pb
from ..lanes.reference import News
from ..session import Place, Progress
from ..tensors.overlap import RULES, Merge
from ..tensors.transfer import Source

# What the server says, as the proto has it.
Welcome = pb.Welcome
Answer = pb.Answer
Final = pb.Final
Group = pb.Group
Held = pb.Held
Pulse = pb.Pulse
Waiting = pb.Waiting
State = pb.State
SharedMemory = pb.SharedMemory
ContributionKind = pb.RunSettings.ContributionKind


@dataclass(frozen=True)
class Settings:
    """What the server decides for every worker (RunSettings in the proto)."""

    mode: str
    source: Source
    num_workers: int  # 0: any number
    steps: int | None  # None: nobody has set them
    batch_size: int
    seed: int
    task: str = ""
    task_args: dict[str, Any] | None = None
    optimizer: str = "sgd"
    optimizer_args: dict[str, Any] | None = None
    polyak: float = 0.0
    pipelined: bool = False
    fragments: int = 1  # of the parameters, of which one is exchanged at a time
    outstanding: int = 0  # means of gradients that a worker goes on without, where workers average among themselves
    union_batch: bool = False  # a version is a step along the gradients of all workers, as one process takes it
    merge: Merge = field(default_factory=Merge)  # where deltas are exchanged and `pipelined`
    train: TrainConfig = field(default_factory=TrainConfig)
    epochs: int | None = None  # instead of steps
    eval_every: str | None = None
    ends_by_figures: bool = False


class Begun(NamedTuple):
    """Where a rank was when a contribution began, and what its script remembered then (State in the proto)."""

    place: Place
    body: bytes


class RowGradients(NamedTuple):
    """Of one table: ids, int64 [n], distinct and ascending, and gradients [n, dim]."""

    table: int
    ids: torch.Tensor
    gradients: torch.Tensor


class Work(NamedTuple):
    """What a contribution says about itself; seconds, and the mean training loss since the last one."""

    num_samples: int  # 0: nobody said
    loss: float
    compute_s: float
    hyperparameters: list[Hyperparameters]  # empty: as before
    transfer_s: float = 0.0  # of the contribution before
    evaluates: bool = False  # the weights of the answer
    num_batches: int | None = None  # None: as many as training steps
    without_gradient: tuple[int, ...] = ()  # positions in the model's specs of parameters that got none
    # With the first: samples of the data set, digest of the gradients, training steps of the run; 0: unknown.
    data: tuple[int, int, int] | None = None
    rates: tuple[float, ...] = ()  # with it: learning rates at the process's first training step
    began: Begun | None = None  # of a script that remembers something
    rows: tuple[RowGradients, ...] = ()
    part: int = 0  # of several that the model is stepped in, from 1
    continues: bool = False  # the training step of the contribution before
    has_base: bool = False  # the weights it was computed on are still all here
    is_fragment: bool = False  # bytes of what is in `without_gradient` are zeros that stay at home
    residual: float = 0.0  # norm of what the codec has kept back,
    residuals_lost: int = 0  # how often such was lost since this process began, and norms of it in all
    residual_lost: float = 0.0
    epoch: int = 0  # of a report: what was averaged over, and whether that came to nothing
    is_broken: bool = False
    bytes_among: int = 0  # sent to other members since the last one
    clip_norm: float = 0.0  # 2-norm that is stepped along at most; 0: any
    # What the optimizer remembers, by parameter and key; or, said to a shard, its part, by `<key>/<parameter>`.
    optimizer: Mapping[str, Any] | None = None


class Goodbye(NamedTuple):
    """What a worker says of itself when it goes (Leave in the proto)."""

    figures: dict[str, float]  # of the final evaluation
    finished: bool = False
    failure: str = ""
    exit_code: int = 0


def message(**kind: Any) -> list[bytes]:
    """A message of one kind, without a body: `message(leave={...})`, the fields of Leave."""
    return [frame(pb.WorkerMessage(**kind))]


def join_message(progress: Progress, host: str, pid: int, device: str, seated: Welcome | None = None) -> pb.Join:
    """`seated`: the coordinator's welcome, shown to another shard. Without what the lane says (`answers_taken`)."""
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


def beat_bytes(progress: Progress) -> bytes:
    return pb.Beat(run=progress.run, rank=progress.rank or 0, process=progress.process).SerializeToString()


def spare_beat(process: str, figures: dict[str, Any] | None) -> bytes:
    """Of a process that evaluates; `figures`: the fields of Figures."""
    beat = pb.Beat(process=process, evaluates=True)
    if figures is not None:
        beat.figures.MergeFrom(pb.Figures(**figures))
    return beat.SerializeToString()


def model_message(layout: Layout, optimizer: OptimizerSpec, codecs: Sequence[str], answer_codec: str) -> pb.Model:
    """Without what a lane has to offer. `codecs`: those that contributions may come in."""
    return pb.Model(
        tensors=layout_to_proto(layout),
        fingerprint=layout.fingerprint,
        optimizer=optimizer_to_proto(optimizer),
        codecs=[name for name in codecs if name != "raw"],
        answer_codec="" if answer_codec == "raw" else answer_codec,
    )


def initial_weights_frames(pieces: Iterable[memoryview], num_bytes: int) -> Iterator[bytes]:
    header = pb.WorkerMessage(initial_weights=pb.InitialWeights(body_bytes=num_bytes))
    if num_bytes <= INLINE_BYTES:
        return iter([frame(header, 0, pieces)])
    return chain([frame(header)], body_frames(pieces))


def brings_weights(answer: pb.Answer) -> bool:
    """Also such as the worker has already, as its reference."""
    return answer.body_bytes > 0 or answer.reference > 0 or answer.HasField("group")


def read_news(answer: pb.Answer) -> News | None:
    """Of the reference that its weights are of; None where they are the server's own."""
    left_out = tuple(one.tensors for one in answer.left_out)
    news = News(answer.reference, answer.checked_reference, answer.reference_crc, left_out)
    return news if answer.reference else None


def contribution(
    progress: Progress, work: Work, body_bytes: int, codec: str, in_segment: bool, reference: int = 0
) -> pb.WorkerMessage:
    """What announces the body of the next contribution, from a worker that has this `reference`."""
    message = pb.WorkerMessage()
    header = message.contribution  # set field by field, which takes a third of making it from them
    header.step = progress.next_number
    header.base_version = progress.version
    header.num_samples = work.num_samples
    header.body_bytes = body_bytes
    header.wants_weights = progress.wants_weights or work.evaluates
    header.evaluates = work.evaluates
    header.codec = codec
    header.loss = work.loss
    header.compute_s = work.compute_s
    header.transfer_s = work.transfer_s
    header.in_segment = in_segment
    header.part = work.part
    header.has_base = work.has_base
    if work.residual:
        header.residual = work.residual
    if work.residuals_lost:
        header.residuals_lost, header.residual_lost = work.residuals_lost, work.residual_lost
    header.reference = reference
    if work.epoch:
        header.epoch, header.broken, header.wants_weights = work.epoch, work.is_broken, False
        header.bytes_among = work.bytes_among
    if work.hyperparameters:
        header.hyperparameters.extend(struct(group) for group in work.hyperparameters)
    if work.clip_norm:
        header.clip_norm = work.clip_norm
    if work.num_batches is not None:
        header.batches = work.num_batches
    if work.without_gradient:
        header.without_gradient.extend(work.without_gradient)
    if work.continues or progress.is_cut_short:
        header.training_steps = 0 if work.continues else progress.local_steps
    if work.data is not None:
        header.data.num_samples, header.data.digest, header.data.steps = work.data
        header.data.rates.extend(work.rates)
    if work.began is not None:
        header.place.MergeFrom(pb.Place(**asdict(work.began.place)))
    return message


def state_frames(body: bytes, kind: Literal["state", "optimizer"] = "state") -> Iterator[bytes]:
    for offset in range(0, len(body), CHUNK_BYTES):
        piece = pb.State(num_bytes=len(body), offset=offset, piece=body[offset : offset + CHUNK_BYTES])
        yield frame(pb.WorkerMessage(state=piece) if kind == "state" else pb.WorkerMessage(optimizer=piece))


def read_began(answer: pb.Answer, body: bytes) -> Begun | None:
    """What came with a START, if there was anything."""
    if not answer.HasField("began"):
        return None
    told = answer.began
    epoch = told.epoch if told.HasField("epoch") else None
    return Begun(Place(told.step, told.local_steps, told.batches, epoch, told.epoch_batches), body)


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


_SOURCES: dict[int, Source] = {
    pb.RunSettings.GRADIENT: "gradient",
    pb.RunSettings.WEIGHTS: "weights",
    pb.RunSettings.DELTA: "delta",
    pb.RunSettings.REPORT: "report",
    pb.RunSettings.DELTA_OF_FRAGMENT: "delta",
    pb.RunSettings.DELTA_OVERLAPPED: "delta",
}


def settings_from(told: bytes) -> Settings:
    """Of `Exchange.told_settings`, in another process of the same worker."""
    return read_settings(pb.RunSettings.FromString(told))


def read_settings(message: pb.RunSettings) -> Settings:
    """Raises UsageError for a run that this worker cannot take part in, a BAD_REQUEST refusal for what is none."""
    check_header(message)
    if message.contribution not in _SOURCES:
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
        source=_SOURCES[message.contribution],
        num_workers=message.num_workers,
        steps=message.steps or None,
        epochs=message.epochs or None,
        eval_every=message.eval_every or None,
        ends_by_figures=message.ends_by_figures,
        batch_size=message.batch_size,
        seed=message.seed,
        task=message.task,
        task_args=_whole_numbers(from_struct(message.task_args)),
        optimizer=optimizer.name,
        optimizer_args=arguments,
        polyak=message.polyak,
        pipelined=message.pipelined,
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
        what = "; ".join(f"train.{shown('.'.join(map(str, one['loc'])))}: {one['msg']}" for one in error.errors()[:5])
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
