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
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from ...proto import parameter_server_pb2 as pb
from ..config.addresses import split_address
from ..errors import Reason, UsageError, bad_request, refusal, shown
from .records import MAX_WORK

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
_TICKET_BYTES = 32

# ---- one value --------------------------------------------------------------------------------------


def check_text(label: str, text: str) -> None:
    """Refuse a name that is too long or has control characters, since names appear in logs and on the dashboard."""
    if len(text) > MAX_NAME or not text.isprintable():
        raise bad_request(
            f"{label} of {len(text)} characters, {text[:40]!a}: at most {MAX_NAME}, all of them printable"
        )


def _range(least: float, most: float) -> Callable[[str, float], None]:
    def check(label: str, value: float) -> None:
        if not least <= value <= most:  # also refuses NaN
            raise bad_request(f"{label} is {value}; the range is {least:g} to {most:g}")

    return check


_count = _range(0, MAX_COUNT)


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
    _range(0, _MAX_SHARDS)(f"number of {label}", len(found))
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


def _closed(known: Iterable[int]) -> Callable[[str, int], None]:
    values = frozenset(known)

    def check(label: str, value: int) -> None:
        if value not in values:
            raise bad_request(f"{label} is {value}, which this program does not know")

    return check


# ---- messages of several fields that belong together --------------------------------------------------


def _check_join(join: pb.Join) -> None:
    if not -1 <= join.rank < MAX_RANK:
        raise refusal(Reason.RANK_OUT_OF_RANGE, f"no rank {join.rank}: -1 to {MAX_RANK - 1} are possible")


def _check_metrics(metrics: Mapping[str, float]) -> None:
    if len(metrics) > _MAX_METRICS:
        raise bad_request(f"{len(metrics)} metrics; at most {_MAX_METRICS} are possible")
    for name in metrics:
        check_text("a metric's name", name)


def _check_welcome(welcome: pb.Welcome) -> None:
    direct = welcome.direct
    if welcome.HasField("direct") and not (0 < direct.port < 65536 and len(direct.ticket) == _TICKET_BYTES):
        fields = f"Welcome.direct has port {direct.port} and a ticket of {len(direct.ticket)} bytes"
        raise bad_request(f"{fields}; a port is 1 to 65535, a ticket has {_TICKET_BYTES}")
    if welcome.shards and (len(welcome.shards) < 2 or welcome.shards[0] or not all(welcome.shards[1:])):
        message = f"Welcome.shards are {len(welcome.shards)} addresses"
        raise bad_request(f"{message}; of two or more only the coordinator's, the first, is empty")


def _check_partial_transfer(message: pb.PartialTransfer) -> None:
    ranges = message.ranges
    if len(ranges) % 2 or any(first >= second for first, second in pairwise(ranges)):
        raise bad_request(f"PartialTransfer.ranges are {len(ranges)} borders that do not ascend in pairs")


def _check_reply(reply: pb.Reply) -> None:
    """Refuse a reply without a result or next work, since the worker cannot continue without them."""
    for topic in ("result", "next_work"):
        if not reply.HasField(topic):
            raise bad_request(f"a Reply without {topic}")


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
_few = _range(0, MAX_RANK)  # workers, and other numbers that are no larger

# Checks of fields, in all messages or in one of them. Text and whole numbers of 64 bits that have none here are checked
# by `check_text` and `_count`. None: another module checks the field, or shows it to people.
RULES: dict[str, Check | None] = {
    "num_workers": _few,
    "fragments": _few,
    "outstanding": _few,
    "same_batches_as": _range(0, MAX_RANK - 1),
    "Welcome.rank": _range(0, MAX_RANK - 1),
    "Counts.num_samples": _range(0, _MAX_SAMPLES),
    "Counts.num_batches": _range(0, _MAX_SAMPLES),
    "State.num_bytes": _range(0, _MAX_STATE_BYTES),
    "batch_size": _range(1, 2**31),
    "seed": _range(0, 2**31 - 1),
    "polyak": _range(0, 1),
    "clip_norm": _range(0, _MAX_NORM),
    **dict.fromkeys(("compute_s", "transfer_s", "gate_wait_s"), _range(0, _MAX_SECONDS)),
    "Welcome.lease_s": _range(*_LEASE_S),
    "outcome": _closed(value for value in pb.Reply.Outcome.values() if value),
    **dict.fromkeys(("FirstInfo.rates", "Rates.first", "Rates.last"), _rates),
    "work": _check_work,
    "secret": _check_secret,
    "rendezvous": check_address,
    "shards": _addresses,
    **dict.fromkeys(("reason", "transport_reason", "status", "reference", "Optimizer.name"), None),
    "Stop.reason": check_text,
}
_WHOLE: dict[type[Message], Callable[[Any], None]] = {
    pb.Join: _check_join,
    pb.EvaluationMetrics: lambda metrics: _check_metrics(metrics.metrics),
    pb.Leave: lambda leave: _check_metrics(leave.final_metrics),
    pb.Welcome: _check_welcome,
    pb.PartialTransfer: _check_partial_transfer,
    pb.Reply: _check_reply,
    pb.NextWork: _check_next_work,
    pb.GroupInfo: _check_group,
    pb.State: _check_state,
}
_NEEDED = {"outcome", "lease_s", "batch_size"}  # required fields: an absent field reads as 0, which is out of range


# Every exchange checks a contribution and a reply. Reading all fields at once takes half the time of the tables, and
# accepts nearly all messages. The tables check the messages that this fast path does not accept.
_OF_RESULT = operator.attrgetter("outcome", "gate_wait_s", "seq", "version", "staleness")
_OF_NEXT_WORK = operator.attrgetter("num_workers", "worker_index", "same_batches_as", "training_steps", "run_steps")

_START, _REJECTED = int(pb.Reply.START), int(pb.Reply.REJECTED)  # the lookup costs as much as the rest of the check


def _is_sound_contribution(contribution: pb.Contribution) -> bool:
    has = contribution.HasField
    if has("completion") or has("position") or has("first"):
        return False
    timing, counts, base, payload = contribution.timing, contribution.counts, contribution.base, contribution.payload
    return (
        0 <= timing.compute_s <= _MAX_SECONDS
        and 0 <= timing.transfer_s <= _MAX_SECONDS
        and 0 <= contribution.training.clip_norm <= _MAX_NORM
        and counts.num_samples <= _MAX_SAMPLES
        and counts.num_batches <= _MAX_SAMPLES
        and contribution.training.iteration <= MAX_COUNT
        and counts.num_workers <= MAX_RANK
        and contribution.seq <= MAX_COUNT
        and max(base.version, payload.num_bytes, contribution.residual.num_lost) <= MAX_COUNT
        and len(payload.codec) <= MAX_NAME
        and payload.codec.isprintable()
    )


def _is_sound_reply(reply: pb.Reply) -> bool:
    has = reply.HasField
    if has("group") or has("start"):
        return False
    outcome, gate_wait_s, seq, version, staleness = _OF_RESULT(reply.result)
    num_workers, worker_index, other, training_steps, run_steps = _OF_NEXT_WORK(reply.next_work)
    if has("weights"):
        weights = reply.weights
        if weights.codec or weights.num_bytes > MAX_COUNT or weights.HasField("reference"):
            return False
    return (
        _START < outcome <= _REJECTED
        and 0 <= gate_wait_s <= _MAX_SECONDS
        and worker_index < num_workers <= MAX_RANK
        and other < MAX_RANK
        and max(seq, version, staleness, training_steps, run_steps) <= MAX_COUNT
    )


_IS_SOUND: dict[type[Message], Callable[[Any], bool]] = {
    pb.Contribution: _is_sound_contribution,
    pb.Reply: _is_sound_reply,
}


_OF_TYPE: dict[int, Check] = {FieldDescriptor.TYPE_STRING: check_text, FieldDescriptor.TYPE_UINT64: _count}


@functools.cache
def _checks_of(message: Any) -> dict[str, Check]:
    """Return the check of each field of the message with this descriptor that has one."""
    found: dict[str, Check] = {}
    for field in message.fields:
        by_name = RULES.get(field.name, None if field.is_repeated else _OF_TYPE.get(field.type))
        if (check := RULES.get(f"{message.name}.{field.name}", by_name)) is not None:
            found[field.name] = check
    return found


def check_header(header: Message) -> None:
    """Check every field of a received message, and of its submessages. Raises a BAD_REQUEST refusal."""
    kind = type(header)
    if (is_sound := _IS_SOUND.get(kind)) is not None and is_sound(header):
        return
    for name, check in _checks_of(kind.DESCRIPTOR).items():
        if (value := getattr(header, name)) or name in _NEEDED:
            check(f"{kind.DESCRIPTOR.name}.{name}", value)
    if (whole := _WHOLE.get(kind)) is not None:
        whole(header)
    for field, value in header.ListFields():
        if field.message_type is not None and not field.is_repeated:
            check_header(value)
