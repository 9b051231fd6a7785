"""Conversion between the records of `records.py` and the protobuf messages of the same names.

A topic is a record within a message, such as `Counts`. Each topic of every exchange has its own functions. They do not
write fields with default values. `_write` and `_read` convert other topics by field name, several times more slowly.
"""

from __future__ import annotations

from typing import Any

from ...proto import parameter_server_pb2 as pb
from . import records
from .structs import hyperparameters_from_proto, struct


def contribution_message(contribution: records.Contribution) -> pb.WorkerMessage:
    """Return the message that announces the contribution's payload."""
    message = pb.WorkerMessage()
    header = message.contribution  # setting each field takes a third of the constructor's time
    header.seq = contribution.id.seq
    _write_counts(contribution.counts, header.counts)
    _write_base(contribution.base, header.base)
    _write_timing(contribution.timing, header.timing)
    _write_payload(contribution.payload, header.payload)
    _write_training(contribution.training, header.training)
    if contribution.residual is not records.NO_RESIDUAL:
        write_residual(contribution.residual, header.residual)
    if contribution.completion is not records.NO_COMPLETION:
        _write(contribution.completion, header.completion)
    if contribution.first is not None:
        _write(contribution.first, header.first)
    if contribution.position is not None:
        _write(contribution.position, header.position)
    return message


def read_contribution(
    header: pb.Contribution, sender: tuple[int, int], kind: records.ContributionKind
) -> records.Contribution:
    """Return the contribution that `sender` (rank, incarnation) sent.

    Raises a BAD_REQUEST refusal for hyperparameters that no optimizer has.
    """
    has = header.HasField
    return records.Contribution(
        records.ContributionId(*sender, header.seq),
        kind,
        _read_counts(header.counts),
        _read_base(header.base),
        _read_timing(header.timing),
        _read_payload(header.payload),
        _read_training(header.training),
        read_residual(header.residual) if has("residual") else records.NO_RESIDUAL,
        _read(records.CompletionInfo, header.completion) if has("completion") else records.NO_COMPLETION,
        _read(records.FirstInfo, header.first) if has("first") else None,
        _read(records.Position, header.position) if has("position") else None,
    )


# ---- by topic -----------------------------------------------------------------------------------------


def _write_counts(counts: records.Counts, message: pb.Counts) -> None:
    if counts.num_samples:
        message.num_samples = counts.num_samples
    message.num_steps, message.num_batches = counts.num_steps, counts.num_batches
    if counts.part:
        message.part = counts.part
    if counts.num_workers > 1:
        message.num_workers = counts.num_workers


def _read_counts(message: pb.Counts) -> records.Counts:
    num_workers = message.num_workers or 1
    return records.Counts(message.num_samples, message.num_steps, message.num_batches, message.part, num_workers)


def _write_base(base: records.Base, message: pb.Base) -> None:
    if base.version:
        message.version = base.version
    if base.has_all:
        message.has_all = True
    if base.reference:
        message.reference = base.reference


def _read_base(message: pb.Base) -> records.Base:
    return records.Base(message.version, message.has_all, message.reference)


def _write_timing(timing: records.Timing, message: pb.Timing) -> None:
    if timing.compute_s:
        message.compute_s = timing.compute_s
    if timing.transfer_s:
        message.transfer_s = timing.transfer_s


def _read_timing(message: pb.Timing) -> records.Timing:
    return records.Timing(message.compute_s, message.transfer_s)


def _write_payload(payload: records.PayloadInfo, message: pb.PayloadInfo) -> None:
    if payload.codec:  # even without bytes: a fragment may have no tensor on a shard
        message.codec = payload.codec
    if payload.num_bytes:
        message.num_bytes = payload.num_bytes
    if payload.in_shared_memory:
        message.in_shared_memory = True
    if payload.without_gradient:
        message.without_gradient.extend(payload.without_gradient)


def _read_payload(message: pb.PayloadInfo) -> records.PayloadInfo:
    without = tuple(message.without_gradient) if message.without_gradient else ()
    return records.PayloadInfo(message.codec, message.num_bytes, message.in_shared_memory, without)


def _write_training(training: records.TrainingInfo, message: pb.TrainingInfo) -> None:
    if training.hyperparameters:
        message.hyperparameters.extend(struct(group) for group in training.hyperparameters)
    if training.clip_norm:
        message.clip_norm = training.clip_norm
    if training.loss:
        message.loss = training.loss
    if training.wants_weights:
        message.wants_weights = True
    if training.evaluates:
        message.evaluates = True
    if training.iteration:
        message.iteration = training.iteration


def _read_training(message: pb.TrainingInfo) -> records.TrainingInfo:
    hyperparameters = tuple(hyperparameters_from_proto(message.hyperparameters)) if message.hyperparameters else ()
    return records.TrainingInfo(
        hyperparameters, message.clip_norm, message.loss, message.wants_weights, message.evaluates, message.iteration
    )


def write_residual(residual: records.ResidualInfo, message: pb.ResidualInfo) -> None:
    if residual.norm:
        message.norm = residual.norm
    if residual.num_lost:
        message.num_lost, message.lost_norm = residual.num_lost, residual.lost_norm


def read_residual(message: pb.ResidualInfo) -> records.ResidualInfo:
    return records.ResidualInfo(message.norm, message.num_lost, message.lost_norm)


# ---- replies ------------------------------------------------------------------------------------------

_OUTCOMES = {int(outcome): outcome for outcome in records.Outcome}


def reply_message(reply: records.Reply) -> pb.ServerMessage:
    """Return the message of a reply. It also announces the weights, if there are any."""
    message = pb.ServerMessage()
    header = message.reply
    _write_result(reply.result, header.result)
    _write_next_work(reply.next_work, header.next_work)
    if reply.weights is not None:
        write_weights(reply.weights, header.weights)
    if reply.group is not None:
        _write(reply.group, header.group)
    if reply.start is not None:
        _write_start(reply.start, header.start)
    return message


def read_reply(header: pb.Reply) -> records.Reply:
    has = header.HasField
    return records.Reply(
        _read_result(header.result),
        _read_next_work(header.next_work),
        read_weights(header.weights) if has("weights") else None,
        _read(records.GroupInfo, header.group) if has("group") else None,
        _read_start(header.start) if has("start") else None,
    )


def _write_result(result: records.Result, message: pb.Result) -> None:
    message.outcome = result.outcome.value  # type: ignore[assignment]
    message.seq, message.version, message.staleness = result.seq, result.version, result.staleness
    message.gate_wait_s, message.reason = result.gate_wait_s, result.reason


def _read_result(message: pb.Result) -> records.Result:
    outcome = _OUTCOMES[message.outcome]
    return records.Result(outcome, message.seq, message.version, message.staleness, message.gate_wait_s, message.reason)


def _write_next_work(work: records.NextWork, message: pb.NextWork) -> None:
    message.local_steps, message.training_steps = work.local_steps, work.training_steps
    message.num_workers, message.worker_index = work.num_workers, work.worker_index
    message.run_steps, message.has_evaluator = work.run_steps or 0, work.has_evaluator
    if work.same_batches_as is not None:
        message.same_batches_as = work.same_batches_as


def _read_next_work(message: pb.NextWork) -> records.NextWork:
    return records.NextWork(
        message.local_steps, message.training_steps, message.num_workers, message.worker_index,
        message.run_steps or None, message.has_evaluator,
        message.same_batches_as if message.HasField("same_batches_as") else None,
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


def _write_start(start: records.StartInfo, message: pb.StartInfo) -> None:
    message.num_batches, message.in_step = start.num_batches, start.in_step
    if start.rates is not None:
        _write(start.rates, message.rates)
    if start.position is not None:
        _write(start.position, message.position)


def _read_start(message: pb.StartInfo) -> records.StartInfo:
    has = message.HasField
    return records.StartInfo(
        message.num_batches,
        message.in_step,
        _read(records.RateInfo, message.rates) if has("rates") else None,
        _read(records.Position, message.position) if has("position") else None,
    )


# ---- topics that few exchanges have -------------------------------------------------------------------


def _write(record: Any, message: Any) -> None:
    """Write a record of numbers, text and tuples into the message with the same fields."""
    for name in type(record).__annotations__:
        value = getattr(record, name)
        if isinstance(value, tuple):
            getattr(message, name).extend(value)
        elif value is not None:
            setattr(message, name, value)


def _read(kind: type[records.Record], message: Any) -> records.Record:
    """Return the record that `_write` wrote. An absent optional field is None."""
    fields = message.DESCRIPTOR.fields_by_name
    return kind(*(_value(message, fields[name]) for name in kind.__annotations__))


def _value(message: Any, field: Any) -> Any:
    if field.is_repeated:
        return tuple(getattr(message, field.name))
    return None if field.has_presence and not message.HasField(field.name) else getattr(message, field.name)
