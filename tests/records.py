"""Contributions and replies as tests write them: by the facts that matter to them."""

from __future__ import annotations

from typing import Any

from paramserver.common.wire import records
from paramserver.common.wire.records import Contribution, ContributionId, NextWork, Outcome, Reply, Result, WeightsInfo
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.core import events
from paramserver.ps.engine.modes import policy_of
from paramserver.ps.policies.base import Policy

_TOPICS: dict[str, Any] = {
    "counts": records.Counts, "base": records.Base, "timing": records.Timing, "payload": records.PayloadInfo,
    "training": records.TrainingInfo, "residual": records.ResidualInfo, "completion": records.CompletionInfo,
    "first": records.FirstInfo,
}  # fmt: skip


def contribution_of(
    seq: int,
    version: int = 0,
    num_samples: int = 1,
    num_steps: int = 1,
    part: int = 0,
    *,
    num_batches: int | None = None,
    seat: tuple[int, int] = (0, 1),
    **facts: Any,
) -> Contribution:
    """Facts are fields of any topic, or whole topics, or the kind. Each step has one batch unless it is said."""
    num_batches = num_steps if num_batches is None else num_batches
    topics: dict[str, dict[str, Any]] = {
        "counts": {"num_samples": num_samples, "num_steps": num_steps, "num_batches": num_batches, "part": part},
        "base": {"version": version},
    }
    whole = {name: facts.pop(name) for name in list(facts) if name in _TOPICS or name == "kind"}
    for fact, value in facts.items():
        topic = next(name for name, kind in _TOPICS.items() if fact in kind.__dataclass_fields__)
        topics.setdefault(topic, {})[fact] = value
    made = {name: _TOPICS[name](**values) for name, values in topics.items()}
    return Contribution(ContributionId(*seat, seq), **{**made, **whole})


def contributed(rank: int, incarnation: int, seq: int, version: int, **facts: Any) -> events.Contributed:
    """The event; also facts of the event itself."""
    outer = {name: facts.pop(name) for name in ("judgement", "looked_s", "traffic", "at") if name in facts}
    return events.Contributed(contribution_of(seq, version, seat=(rank, incarnation), **facts), **outer)


def contribution_proto(seq: int, **facts: Any) -> pb.Contribution:
    """The message; facts are fields of it or of any of its topics."""
    message = pb.Contribution(seq=seq, counts=pb.Counts(num_steps=1, num_batches=1))
    topics = {field.name: field.message_type for field in message.DESCRIPTOR.fields if field.name in _TOPICS}
    for fact, value in facts.items():
        if fact in message.DESCRIPTOR.fields_by_name:
            message.MergeFrom(pb.Contribution(**{fact: value}))
            continue
        topic = next(name for name, kind in topics.items() if fact in kind.fields_by_name)
        inner = getattr(message, topic)
        inner.MergeFrom(type(inner)(**{fact: value}))
        if not value and not isinstance(value, list | tuple):
            setattr(inner, fact, value)  # said, though it is 0
    return message


def reply_of(
    seq: int = 0,
    version: int = 0,
    local_steps: int = 1,
    num_bytes: int | None = 16,
    *,
    outcome: Outcome = Outcome.APPLIED,
    training_steps: int = 0,
    **facts: Any,
) -> Reply:
    """With weights of `num_bytes`, or without any; `facts` are fields of Result or NextWork."""
    of_result = {name: facts.pop(name) for name in list(facts) if name in Result.__dataclass_fields__}
    return Reply(
        Result(outcome, seq, version, **of_result),
        NextWork(local_steps, training_steps, **facts),
        None if num_bytes is None else WeightsInfo(num_bytes),
    )


def reply_proto(outcome: Any, **facts: Any) -> pb.Reply:
    """The message; facts are fields of its topics, or whole topics."""
    message = pb.Reply(result=pb.Result(outcome=outcome), next_work=pb.NextWork())
    for fact, value in facts.items():
        if fact in message.DESCRIPTOR.fields_by_name:
            message.MergeFrom(pb.Reply(**{fact: value}))
            continue
        fields = message.DESCRIPTOR.fields
        topic = next(field.name for field in fields if fact in field.message_type.fields_by_name)
        inner = getattr(message, topic)
        inner.MergeFrom(type(inner)(**{fact: value}))
    return message


def joined(mode: str, num_workers: int, **options: Any) -> Policy:
    """A policy whose workers have all joined."""
    policy = policy_of(mode, {"num_workers": num_workers, **options})
    for rank in range(num_workers):
        policy.joined(rank, 0.0)
    return policy


def generation_of(policy: Policy, rank: int) -> int:
    """Of the group that this worker averages in; 0 where it has no peers."""
    group = policy.group_info(rank)
    return 0 if group is None else group.generation
