"""Conversion between the records of `records.py` and the protobuf messages of the same names.

A topic is a record within a message, such as `Counts`. Each direction has one writer and one reader, which name every
field of the topics that all exchanges have. They do not write fields with default values. `write_topic` and
`read_topic` convert the other topics by field name, several times more slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...proto import parameter_server_pb2 as pb
from . import records
from .checks import hyperparameters_from_proto, struct

_INNER = {"rates": records.RateInfo, "position": records.Position}  # topics of `StartInfo`, which is a topic itself


def contribution_message(
    contribution: records.Contribution,
    payload: records.PayloadInfo | None = None,
    hyperparameters: Sequence[dict[str, Any]] | None = None,
) -> pb.WorkerMessage:
    """Return the message that announces the contribution's payload.

    A shard has its own `payload`, and the `hyperparameters` that it does not know yet; None: the contribution's.
    """
    message = pb.WorkerMessage()
    header = message.contribution  # setting each field takes a third of the constructor's time
    header.seq = contribution.id.seq
    counts = contribution.counts
    target: Any = header.counts  # in turn each topic of the message
    target.num_samples, target.num_steps, target.num_batches = counts.num_samples, counts.num_steps, counts.num_batches
    target.part, target.num_workers = counts.part, counts.num_workers if counts.num_workers > 1 else 0
    if (base := contribution.base) is not records.NO_BASE:
        target = header.base
        target.version, target.has_all, target.reference = base.version, base.has_all, base.reference
    if (timing := contribution.timing) is not records.NO_TIMING:
        target = header.timing
        target.compute_s, target.transfer_s = timing.compute_s, timing.transfer_s
    payload = contribution.payload if payload is None else payload
    if payload is not records.NO_PAYLOAD:
        target = header.payload
        target.codec, target.num_bytes = payload.codec, payload.num_bytes
        target.in_shared_memory = payload.in_shared_memory
        if payload.without_gradient:
            target.without_gradient.extend(payload.without_gradient)
    training, target = contribution.training, header.training
    if groups := training.hyperparameters if hyperparameters is None else hyperparameters:
        target.hyperparameters.extend(map(struct, groups))
    target.clip_norm, target.loss, target.iteration = training.clip_norm, training.loss, training.iteration
    target.wants_weights, target.wants_exact = training.wants_weights, training.wants_exact
    residual = contribution.residual
    if residual.norm or residual.num_lost:
        target = header.residual
        target.norm, target.num_lost, target.lost_norm = residual.norm, residual.num_lost, residual.lost_norm
    if contribution.completion is not records.NO_COMPLETION:
        write_topic(contribution.completion, header.completion)
    if contribution.first is not None:
        write_topic(contribution.first, header.first)
    if contribution.position is not None:
        write_topic(contribution.position, header.position)
    return message


def read_contribution(
    header: pb.Contribution, sender: tuple[int, int], kind: records.ContributionKind
) -> records.Contribution:
    """Return the contribution that `sender` (rank, incarnation) sent.

    Raises a BAD_REQUEST refusal for hyperparameters that no optimizer has.
    """
    has, counts, base, timing = header.HasField, header.counts, header.base, header.timing
    payload, training, residual = header.payload, header.training, header.residual
    without = tuple(payload.without_gradient) if payload.without_gradient else ()
    hyperparameters = tuple(hyperparameters_from_proto(training.hyperparameters)) if training.hyperparameters else ()
    return records.Contribution(
        records.ContributionId(*sender, header.seq),
        kind,
        records.Counts(
            counts.num_samples, counts.num_steps, counts.num_batches, counts.part, counts.num_workers or 1
        ),
        records.Base(base.version, base.has_all, base.reference),
        records.Timing(timing.compute_s, timing.transfer_s),
        records.PayloadInfo(payload.codec, payload.num_bytes, payload.in_shared_memory, without),
        records.TrainingInfo(
            hyperparameters, training.clip_norm, training.loss, training.wants_weights, training.wants_exact,
            training.iteration,
        ),
        records.ResidualInfo(residual.norm, residual.num_lost, residual.lost_norm)
        if has("residual")
        else records.NO_RESIDUAL,
        read_topic(records.CompletionInfo, header.completion) if has("completion") else records.NO_COMPLETION,
        read_topic(records.FirstInfo, header.first) if has("first") else None,
        read_topic(records.Position, header.position) if has("position") else None,
    )  # fmt: skip


# ---- replies ------------------------------------------------------------------------------------------

_OUTCOMES = {int(outcome): outcome for outcome in records.Outcome}


def reply_message(reply: records.Reply) -> pb.ServerMessage:
    """Return the message of a reply. It also announces the weights, if there are any."""
    message = pb.ServerMessage()
    header = message.reply
    result = reply.result
    target: Any = header.result
    target.outcome = result.outcome.value
    target.seq, target.version, target.staleness = result.seq, result.version, result.staleness
    target.gate_wait_s, target.reason = result.gate_wait_s, result.reason
    work, target = reply.next_work, header.next_work
    target.local_steps, target.training_steps = work.local_steps, work.training_steps
    target.num_workers, target.worker_index = work.num_workers, work.worker_index
    target.run_steps, target.is_asked = work.run_steps or 0, work.is_asked
    if work.same_batches_as is not None:
        target.same_batches_as = work.same_batches_as
    if reply.weights is not None:
        write_weights(reply.weights, header.weights)
    if reply.group is not None:
        write_topic(reply.group, header.group)
    if reply.start is not None:
        write_topic(reply.start, header.start)
    return message


def read_reply(header: pb.Reply) -> records.Reply:
    has, result, work = header.HasField, header.result, header.next_work
    return records.Reply(
        records.Result(
            _OUTCOMES[result.outcome], result.seq, result.version, result.staleness, result.gate_wait_s, result.reason
        ),
        records.NextWork(
            work.local_steps, work.training_steps, work.num_workers, work.worker_index, work.run_steps or None,
            work.is_asked, work.same_batches_as if work.HasField("same_batches_as") else None,
        ),
        read_weights(header.weights) if has("weights") else None,
        read_topic(records.GroupInfo, header.group) if has("group") else None,
        read_topic(records.StartInfo, header.start) if has("start") else None,
    )  # fmt: skip


def write_weights(weights: records.WeightsInfo, message: pb.WeightsInfo) -> None:
    message.num_bytes, message.codec = weights.num_bytes, weights.codec
    if weights.segment is not None:
        message.segment.CopyFrom(weights.segment)
    if (reference := weights.reference) is not None:
        target = message.reference
        target.number, target.checked, target.crc = reference.number, reference.checked, reference.crc
        target.left_out.extend(pb.LeftOut(tensors=tensors) for tensors in reference.left_out)


def read_weights(message: pb.WeightsInfo) -> records.WeightsInfo:
    segment = message.segment if message.HasField("segment") else None
    reference = None
    if message.HasField("reference"):
        found = message.reference
        left_out = tuple(tuple(item.tensors) for item in found.left_out)
        reference = records.ReferenceInfo(found.number, found.checked, found.crc, left_out)
    return records.WeightsInfo(message.num_bytes, message.codec, segment, reference)


# ---- topics that few exchanges have -------------------------------------------------------------------


def write_topic(record: Any, message: Any) -> None:
    """Write a record of numbers, text, tuples and records into the message with the same fields."""
    for name in type(record).__annotations__:
        value = getattr(record, name)
        if isinstance(value, records.RateInfo | records.Position):
            write_topic(value, getattr(message, name))
        elif isinstance(value, tuple):
            getattr(message, name).extend(value)
        elif value is not None:
            setattr(message, name, value)


def read_topic(kind: type[records.Record], message: Any) -> records.Record:
    """Return the record that `write_topic` wrote. An absent optional field is None."""
    values = []
    for name in kind.__annotations__:
        field, value = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
        if field.has_presence and not message.HasField(name):
            value = None
        elif field.is_repeated:
            value = tuple(value)
        elif field.message_type is not None:
            value = read_topic(_INNER[name], value)
        values.append(value)
    return kind(*values)
