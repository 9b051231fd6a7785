"""Checks of received messages, field by field. A value outside its range or list is a BAD_REQUEST refusal.

Server and worker check each other's messages here before they use them. Other modules check the rest:

- `frames.py` checks payloads.
- `protocol.py` checks models, optimizers and hyperparameters when it reads them.
- The registry checks names of code (a codec, an optimizer, a task) against its own list.
- `errors.shown` cleans text that is shown to people.

An address must be HOST:PORT. Other targets that gRPC accepts, such as a unix socket, are refused.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from ...proto import parameter_server_pb2 as pb
from ..config.addresses import split_address
from ..errors import Reason, UsageError, bad_request, refusal, shown
from .direct import TICKET_BYTES
from .records import COUNTED, MAX_WORK

MAX_NAME = 1_000  # characters
MAX_COUNT = 2**62  # steps, versions, batches: far beyond any run, and MAX_COUNT + 1 still fits 64 bits
MAX_RANK = 1 << 16
_MAX_METRICS = 1_000
_MAX_SECONDS = 1e9
_MAX_NORM = sys.float_info.max  # excludes infinity
_LEASE_S = 0.01, 1e6
_MAX_SAMPLES = 2**40  # in a contribution; also its batches
_MAX_SHARDS = 4096
_MAX_GROUPS = 100_000  # parameter groups of an optimizer
_MAX_STATE_BYTES = 1 << 40  # the setting limits.state_bytes is the server's own, lower limit
_SECRET_BYTES = 32

# ---- one value --------------------------------------------------------------------------------------


def check_text(label: str, text: str) -> None:
    """Refuse a name that is too long or has control characters, since names appear in logs and on the dashboard."""
    if len(text) > MAX_NAME or not text.isprintable():
        raise bad_request(
            f"{label} of {len(text)} characters, {text[:40]!a}: at most {MAX_NAME}, all of them printable"
        )


def check_address(label: str, text: str) -> None:
    """Refuse text that is neither empty nor HOST:PORT. Any host is allowed, as shards and peers run on any machine."""
    try:
        is_reached = not text or (len(text) <= MAX_NAME and text.isprintable() and split_address(text)[1] > 0)
    except UsageError:
        is_reached = False
    if not is_reached:
        raise bad_request(f"{label} is '{shown(text)}', which is not HOST:PORT")


def _addresses(label: str, texts: Iterable[str]) -> None:
    found = list(texts)
    if len(found) > _MAX_SHARDS:
        raise bad_request(f"number of {label} is {len(found)}; the range is 0 to {_MAX_SHARDS}")
    for text in found:
        check_address(label, text)


def _check_secret(label: str, value: bytes) -> None:
    if len(value) != _SECRET_BYTES:
        raise bad_request(f"{label} has {len(value)} bytes; {_SECRET_BYTES} are right")


def _rates(label: str, rates: Sequence[float]) -> None:
    """Check learning rates, one for each group of an optimizer."""
    if len(rates) > _MAX_GROUPS or not all(map(math.isfinite, rates)):
        message = f"{label} are {len(rates)} learning rates, or one that is not finite"
        raise bad_request(f"{message}; at most {_MAX_GROUPS} are possible")


def _check_work(label: str, work: str) -> None:
    if len(work) > MAX_WORK:
        raise bad_request(f"{label} has {len(work)} characters; at most {MAX_WORK}")


def _check_metrics(label: str, metrics: Mapping[str, float]) -> None:
    if len(metrics) > _MAX_METRICS:
        raise bad_request(f"{len(metrics)} metrics; at most {_MAX_METRICS} are possible")
    for name in metrics:
        check_text("a metric's name", name)


# ---- messages of several fields that belong together --------------------------------------------------


def _check_join(join: pb.Join) -> None:
    if not -1 <= join.rank < MAX_RANK:
        raise refusal(Reason.RANK_OUT_OF_RANGE, f"no rank {join.rank}: -1 to {MAX_RANK - 1} are possible")


def _check_welcome(welcome: pb.Welcome) -> None:
    direct = welcome.direct
    if welcome.HasField("direct") and not (0 < direct.port < 65536 and len(direct.ticket) == TICKET_BYTES):
        fields = f"Welcome.direct has port {direct.port} and a ticket of {len(direct.ticket)} bytes"
        raise bad_request(f"{fields}; a port is 1 to 65535, a ticket has {TICKET_BYTES}")
    if welcome.shards and (len(welcome.shards) < 2 or welcome.shards[0] or not all(welcome.shards[1:])):
        message = f"Welcome.shards are {len(welcome.shards)} addresses"
        raise bad_request(f"{message}; of two or more only the coordinator's, the first, is empty")


def _check_partial_transfer(message: pb.PartialTransfer) -> None:
    ranges = message.ranges
    if len(ranges) % 2 or any(first >= second for first, second in pairwise(ranges)):
        raise bad_request(f"PartialTransfer.ranges are {len(ranges)} borders that do not ascend in pairs")


def _check_next_work(work: pb.NextWork) -> None:
    if work.worker_index >= max(1, work.num_workers):
        raise bad_request(f"NextWork.worker_index is {work.worker_index} of {work.num_workers} workers")


def _check_group(group: pb.GroupInfo) -> None:
    members = group.members
    if any(first >= second for first, second in pairwise(members)) or (members and members[-1] >= MAX_RANK):
        raise bad_request(f"GroupInfo.members are {len(members)} ranks that do not ascend to {MAX_RANK}")


def _check_state(state: pb.State) -> None:
    if state.offset + len(state.piece) > state.num_bytes:
        piece = f"a piece of a State of {len(state.piece)} bytes at {state.offset}"
        raise bad_request(f"{piece}; all of it are {state.num_bytes}")


# ---- all of them ------------------------------------------------------------------------------------

Check = Callable[[str, Any], None]
Range = tuple[float, float]  # the least and the most
_FEW = 0, MAX_RANK  # workers, and other numbers that are no larger

# Rules for fields, in all messages or in one of them: a range, a closed set of values, or a check. Without a rule here,
# `check_text` checks text, and whole numbers of 64 bits are at most MAX_COUNT. None: another module checks the field,
# or shows it to people. An absent field reads as 0, so a rule that excludes 0 makes the field required.
RULES: dict[str, Range | frozenset[int] | Check | None] = {
    "num_workers": _FEW,
    "fragments": _FEW,
    "outstanding": _FEW,
    "same_batches_as": (0, MAX_RANK - 1),
    "Welcome.rank": (0, MAX_RANK - 1),
    "Counts.num_samples": (0, _MAX_SAMPLES),
    "Counts.num_batches": (0, _MAX_SAMPLES),
    "State.num_bytes": (0, _MAX_STATE_BYTES),
    "batch_size": (1, 2**31),
    "seed": (0, 2**31 - 1),
    "polyak": (0, 1),
    "clip_norm": (0, _MAX_NORM),
    **dict.fromkeys(("compute_s", "transfer_s", "gate_wait_s"), (0, _MAX_SECONDS)),
    "Welcome.lease_s": _LEASE_S,
    "outcome": frozenset(value for value in pb.Reply.Outcome.values() if value),
    **dict.fromkeys(("FirstInfo.rates", "Rates.first", "Rates.last"), _rates),
    **dict.fromkeys(("Metrics.metrics", "final_metrics"), _check_metrics),
    "work": _check_work,
    "secret": _check_secret,
    "rendezvous": check_address,
    "shards": _addresses,
    **dict.fromkeys(("reason", "transport_reason", "status", "reference", "Optimizer.name"), None),
    "Stop.reason": check_text,
}
_REQUIRED = {"Reply.result", "Reply.next_work"}  # the worker cannot continue without them
_OF_TYPE: dict[int, Range | Check] = {
    FieldDescriptor.TYPE_STRING: check_text,
    FieldDescriptor.TYPE_UINT64: (0, MAX_COUNT),
}
_WHOLE: dict[type[Message], Callable[[Any], None]] = {
    pb.Join: _check_join,
    pb.Welcome: _check_welcome,
    pb.PartialTransfer: _check_partial_transfer,
    pb.NextWork: _check_next_work,
    pb.GroupInfo: _check_group,
    pb.State: _check_state,
}


class _Plan(NamedTuple):
    """The fields of a message by the way in which they are checked."""

    ranges: list[tuple[str, float, float]]
    choices: list[tuple[str, frozenset[int]]]
    checks: list[tuple[str, Check]]  # of fields that are not empty
    parts: list[tuple[str, bool]]  # messages, and whether they are required


@functools.cache
def _plan_of(message: Any) -> _Plan:
    """Return the plan of the message with this descriptor."""
    plan = _Plan([], [], [], [])
    for field in message.fields:
        by_name = RULES.get(field.name, None if field.is_repeated else _OF_TYPE.get(field.type))
        full_name = f"{message.name}.{field.name}"
        rule = RULES.get(full_name, by_name)
        if isinstance(rule, tuple):
            plan.ranges.append((field.name, *rule))
        elif isinstance(rule, frozenset):
            plan.choices.append((field.name, rule))
        elif rule is not None:
            plan.checks.append((field.name, rule))
        elif field.message_type is not None and not field.is_repeated:
            plan.parts.append((field.name, full_name in _REQUIRED))
    return plan


# Every exchange has a contribution and a reply. These two functions accept nearly all of them, and take a third of the
# time of a plan. A message that they do not accept is checked by its plan.


def _is_sound_contribution(contribution: Any) -> bool:
    if any(map(contribution.HasField, ("completion", "first", "position", "residual"))):
        return False
    counts, timing, training = contribution.counts, contribution.timing, contribution.training
    payload = contribution.payload
    return bool(
        0 <= timing.compute_s <= _MAX_SECONDS
        and 0 <= timing.transfer_s <= _MAX_SECONDS
        and 0 <= training.clip_norm <= _MAX_NORM
        and max(counts.num_samples, counts.num_batches) <= _MAX_SAMPLES
        and counts.num_workers <= MAX_RANK
        and max(contribution.seq, contribution.base.version, training.iteration, payload.num_bytes) <= MAX_COUNT
        and payload.codec in ("", "raw")
    )


def _is_sound_reply(reply: Any) -> bool:
    if any(map(reply.HasField, ("group", "start"))):
        return False
    result, work, weights = reply.result, reply.next_work, reply.weights
    return bool(
        result.outcome in COUNTED
        and 0 <= result.gate_wait_s <= _MAX_SECONDS
        and work.worker_index < work.num_workers <= MAX_RANK
        and work.same_batches_as < MAX_RANK
        and max(result.seq, result.version, result.staleness, work.training_steps, work.run_steps) <= MAX_COUNT
        and not (weights.codec or weights.HasField("reference") or weights.HasField("segment"))
        and weights.num_bytes <= MAX_COUNT
    )


_IS_SOUND: dict[type[Message], Callable[[Any], bool]] = {
    pb.Contribution: _is_sound_contribution,
    pb.Reply: _is_sound_reply,
}


def check_header(header: Message) -> None:
    """Check every field of a received message, and of its submessages. Raises a BAD_REQUEST refusal."""
    is_sound = _IS_SOUND.get(type(header))
    if is_sound is not None and is_sound(header):
        return
    pending: list[Any] = [header]
    while pending:
        message = pending.pop()
        kind = message.DESCRIPTOR
        ranges, choices, checks, parts = _plan_of(kind)
        for name, least, most in ranges:
            if not least <= (value := getattr(message, name)) <= most:  # also refuses NaN
                raise bad_request(f"{kind.name}.{name} is {value}; the range is {least:g} to {most:g}")
        for name, known in choices:
            if (value := getattr(message, name)) not in known:
                raise bad_request(f"{kind.name}.{name} is {value}, which this program does not know")
        for name, check in checks:
            if value := getattr(message, name):
                check(f"{kind.name}.{name}", value)
        if (whole := _WHOLE.get(type(message))) is not None:
            whole(message)
        for name, is_required in parts:
            if message.HasField(name):
                pending.append(getattr(message, name))
            elif is_required:
                raise bad_request(f"a {kind.name} without {name}")


# ---- structs -------------------------------------------------------------------------------------
# Hyperparameters and other settings of any form as protobuf's `Struct`. Those of another process are checked when
# they are read.


_MAX_HYPERPARAMETERS = 200_000  # in all groups; groups and items of lists count too


def struct(values: dict[str, Any]) -> Struct:
    """Return a dict as a protobuf Struct."""
    message = Struct()
    message.update(values)
    return message


def from_struct(message: Struct) -> dict[str, Any]:
    """Return a Struct as a dict. Protobuf's own conversion goes through JSON, which has no infinity."""
    return {key: _from_value(value) for key, value in message.fields.items()}


def _from_value(value: Any) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return from_struct(value.struct_value)
    if kind == "list_value":
        return [_from_value(item) for item in value.list_value.values]
    return None if kind in (None, "null_value") else getattr(value, kind)


def hyperparameters_from_proto(groups: Any) -> list[dict[str, Any]]:
    """Return the hyperparameters of each group. Raises a BAD_REQUEST refusal for NaN, Inf, or too many values."""
    if not groups:
        return []
    num_left = _MAX_HYPERPARAMETERS - len(groups)
    for key, value in (item for group in groups for item in _values(group.fields.items())):
        num_left -= 1
        if num_left < 0:
            break
        check_text("a hyperparameter's name", key)
        kind = value.WhichOneof("kind")
        if kind == "number_value" and not math.isfinite(value.number_value):
            raise bad_request(f"hyperparameter {key} is not finite")
        if kind == "string_value":
            check_text(f"hyperparameter {key}", value.string_value)
    if num_left < 0:
        raise bad_request(f"more than {_MAX_HYPERPARAMETERS} hyperparameters")
    return [from_struct(group) for group in groups]


def _values(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield every value with its key, also values within lists and groups. Protobuf limits the depth."""
    for key, value in pairs:
        yield key, value
        kind = value.WhichOneof("kind")
        if kind == "struct_value":
            yield from _values(value.struct_value.fields.items())
        elif kind == "list_value":
            yield from _values((key, item) for item in value.list_value.values)
