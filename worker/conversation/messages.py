"""The worker's messages: our own types in, frames out, and back. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ...common.tensors.layout import Layout
from ...common.tensors.optimizers import Hyperparameters, OptimizerSpec
from ...common.version import PROGRAM_VERSION
from ...common.wire.frames import frame, message_frames
from ...common.wire.protocol import (
    from_struct,
    layout_to_proto,
    optimizer_to_proto,
    segment_from_proto,
    struct,
)
from ...common.wire.segments import SegmentAddress
from ...proto import parameter_server_pb2 as pb
from ..session import Progress


@dataclass(frozen=True)
class Settings:
    """What the server decides for every worker (RunSettings in the proto)."""

    mode: str
    source: Literal["gradient", "weights"]
    num_workers: int  # 0: any number
    steps: int
    batch_size: int
    seed: int
    task: str = ""
    task_args: dict[str, Any] | None = None
    optimizer: str = "sgd"
    optimizer_args: dict[str, Any] | None = None
    polyak: float = 0.0
    pipelined: bool = False


class Answer(NamedTuple):
    """The server's word after a contribution; see Answer in the proto."""

    outcome: str
    step: int
    version: int
    next_local_steps: int
    body_bytes: int
    staleness: int
    held_s: float
    reason: str
    num_workers: int
    worker_index: int
    training_steps: int
    segment: SegmentAddress | None  # where the weights lie, when they are placed
    codec: str  # of the weights; empty: raw


class Final(NamedTuple):
    version: int
    body_bytes: int
    evaluate: bool
    segment: SegmentAddress | None


class Welcome(NamedTuple):
    """Who this process is in the run; see Welcome in the proto."""

    run: str
    rank: int
    incarnation: int
    step: int  # contributions that count
    server_incarnation: int
    is_resumed: bool
    lease_s: float
    pull_every: int
    settings: Settings
    shards: tuple[str, ...]  # addresses by number, the coordinator's own empty; () where there is one server


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
        join.seated, join.resumed, join.server_incarnation = True, seated.is_resumed, seated.server_incarnation
    return join


def join_frames(join: pb.Join) -> list[bytes]:
    return [frame(pb.WorkerMessage(join=join))]


def beat_bytes(progress: Progress) -> bytes:
    return pb.Beat(run=progress.run, rank=progress.rank or 0, process=progress.process).SerializeToString()


def repeat_frame(step: int) -> bytes:
    """Ask again for the answer to a contribution that counts."""
    return frame(pb.WorkerMessage(contribution=pb.Contribution(step=step, repeat=True)))


def model_message(layout: Layout, optimizer: OptimizerSpec, answer_codec: str) -> pb.Model:
    """Without what a lane has to offer."""
    return pb.Model(
        tensors=layout_to_proto(layout),
        fingerprint=layout.fingerprint,
        optimizer=optimizer_to_proto(optimizer),
        answer_codec="" if answer_codec == "raw" else answer_codec,
    )


def model_frames(model: pb.Model) -> list[bytes]:
    return [frame(pb.WorkerMessage(model=model))]


def initial_weights_frames(pieces: list[memoryview]) -> Iterator[bytes]:
    header = pb.InitialWeights(body_bytes=sum(map(len, pieces)))
    return message_frames(pb.WorkerMessage(initial_weights=header), pieces)


class Facts(NamedTuple):
    """What a contribution says about itself; times in seconds, `loss` the mean since the last one."""

    num_samples: int
    loss: float
    compute_s: float
    transfer_s: float
    hyperparameters: list[Hyperparameters]  # empty: as before


def contribution(progress: Progress, facts: Facts, body_bytes: int, codec: str, in_segment: bool) -> pb.WorkerMessage:
    """What announces the body of the next contribution."""
    header = pb.Contribution(
        step=progress.step + 1,
        base_version=progress.version,
        num_samples=max(1, facts.num_samples),
        body_bytes=body_bytes,
        wants_weights=progress.wants_weights,
        hyperparameters=[struct(group) for group in facts.hyperparameters],
        codec=codec,
        loss=facts.loss,
        compute_s=facts.compute_s,
        transfer_s=facts.transfer_s,
        in_segment=in_segment,
    )
    return pb.WorkerMessage(contribution=header)


def taken_frame() -> bytes:
    return frame(pb.WorkerMessage(taken=pb.Taken()))


def finish_frames(transfer_s: float, can_evaluate: bool) -> list[bytes]:
    return [frame(pb.WorkerMessage(finish=pb.Finish(transfer_s=transfer_s, can_evaluate=can_evaluate)))]


def leave_frames(metrics: dict[str, float]) -> list[bytes]:
    return [frame(pb.WorkerMessage(leave=pb.Leave(metrics=metrics)))]


def read_welcome(message: pb.Welcome) -> Welcome:
    return Welcome(
        run=message.run,
        rank=message.rank,
        incarnation=message.incarnation,
        step=message.step,
        server_incarnation=message.server_incarnation,
        is_resumed=message.resumed,
        lease_s=message.lease_s,
        pull_every=max(1, message.settings.pull_every),
        settings=read_settings(message.settings),
        shards=tuple(message.shards),
    )


def read_settings(message: pb.RunSettings) -> Settings:
    arguments = from_struct(message.optimizer.groups[0].hyperparameters) if message.optimizer.groups else {}
    return Settings(
        mode=message.mode,
        source="weights" if message.contribution == pb.RunSettings.WEIGHTS else "gradient",
        num_workers=message.num_workers,
        steps=message.steps,
        batch_size=message.batch_size,
        seed=message.seed,
        task=message.task,
        task_args=_whole_numbers(from_struct(message.task_args)),
        optimizer=message.optimizer.name,
        optimizer_args=arguments,
        polyak=message.polyak,
        pipelined=message.pipelined,
    )


def read_answer(message: pb.Answer) -> Answer:
    return Answer(
        outcome=pb.Answer.Outcome.Name(message.outcome),
        step=message.step,
        version=message.version,
        next_local_steps=message.next_local_steps,
        body_bytes=message.body_bytes,
        staleness=message.staleness,
        held_s=message.held_s,
        reason=message.reason,
        num_workers=message.num_workers,
        worker_index=message.worker_index,
        training_steps=message.training_steps,
        segment=_segment(message),
        codec=message.codec,
    )


def read_final(message: pb.Final) -> Final:
    return Final(message.version, message.body_bytes, message.evaluate, _segment(message))


def _segment(message: Any) -> SegmentAddress | None:
    return segment_from_proto(message.segment) if message.HasField("segment") else None


def _whole_numbers(value: Any) -> Any:
    """Struct knows one kind of number; where a whole one was meant, give an int back."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    return value
