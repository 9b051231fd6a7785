"""The worker's messages: our own types in, frames out, and back. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ..common.layout import Layout
from ..common.optimizers import Hyperparameters, OptimizerSpec
from ..common.protocol import from_struct, layout_to_proto, optimizer_to_proto, struct
from ..common.wire import frame, message_frames
from ..proto import parameter_server_pb2 as pb
from .session import Progress
from .version import PROGRAM_VERSION


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


class Final(NamedTuple):
    version: int
    body_bytes: int
    evaluate: bool


def join_frames(progress: Progress, host: str, pid: int, device: str) -> list[bytes]:
    join = pb.Join(
        run=progress.run,
        rank=-1 if progress.rank is None else progress.rank,
        incarnation=progress.incarnation,
        host=host,
        pid=pid,
        device=device,
        program_version=PROGRAM_VERSION,
    )
    return [frame(pb.WorkerMessage(join=join))]


def model_frames(layout: Layout, optimizer: OptimizerSpec) -> list[bytes]:
    model = pb.Model(
        tensors=layout_to_proto(layout), fingerprint=layout.fingerprint, optimizer=optimizer_to_proto(optimizer)
    )
    return [frame(pb.WorkerMessage(model=model))]


def initial_weights_frames(pieces: list[memoryview]) -> Iterator[bytes]:
    header = pb.InitialWeights(body_bytes=sum(map(len, pieces)))
    return message_frames(pb.WorkerMessage(initial_weights=header), pieces)


def contribution_frames(
    progress: Progress,
    pieces: list[memoryview],
    codec: str,
    num_samples: int,
    hyperparameters: list[Hyperparameters],
    told: tuple[float, float, float],
) -> Iterator[bytes]:
    """`told` is (mean loss, compute_s, transfer_s)."""
    loss, compute_s, transfer_s = told
    header = pb.Contribution(
        step=progress.step + 1,
        base_version=progress.version,
        num_samples=num_samples,
        body_bytes=sum(map(len, pieces)),
        wants_weights=progress.wants_weights,
        hyperparameters=[struct(group) for group in hyperparameters],
        codec=codec,
        loss=loss,
        compute_s=compute_s,
        transfer_s=transfer_s,
    )
    return message_frames(pb.WorkerMessage(contribution=header), pieces)


def finish_frames(transfer_s: float, can_evaluate: bool) -> list[bytes]:
    return [frame(pb.WorkerMessage(finish=pb.Finish(transfer_s=transfer_s, can_evaluate=can_evaluate)))]


def leave_frames(metrics: dict[str, float]) -> list[bytes]:
    return [frame(pb.WorkerMessage(leave=pb.Leave(metrics=metrics)))]


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
    )


def read_final(message: pb.Final) -> Final:
    return Final(message.version, message.body_bytes, message.evaluate)


def _whole_numbers(value: Any) -> Any:
    """Struct knows one kind of number; where a whole one was meant, give an int back."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    return value
