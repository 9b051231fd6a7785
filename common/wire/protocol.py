"""Between the proto's messages and our own types; the only place that knows both.

Everything that comes from the network is checked here: a value outside its range is a
BAD_REQUEST refusal that names field, limit and value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.struct_pb2 import Struct

from ...proto import parameter_server_pb2 as pb
from ..errors import ParamServerError, Reason, UnreachableError, refusal
from ..tensors.layout import Kind, Layout, TensorSpec
from ..tensors.optimizers import GroupSpec, Hyperparameters, OptimizerSpec
from .segments import SegmentAddress

SERVICE = "paramserver.v1.ParameterServer"
# What a message may hold. Each of these numbers is far beyond real models, and bounds the time one message takes.
_MAX_TENSORS = 100_000
_MAX_DIMENSIONS = 64  # torch's own limit
_MAX_NAMES = 200_000  # of tensors and aliases
_MAX_NAME = 1_000  # characters
_MAX_HYPERPARAMETERS = 200_000  # in all groups, items of lists and groups counted
_MAX_METRICS = 1_000
_MAX_SECONDS = 1e9
_MAX_RANK = 1 << 16
# gRPC limits all metadata of a call to 8 KiB by default.
_MAX_TEXT = 2_000

STATUS_OF_REASON = {
    Reason.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.RANK_OUT_OF_RANGE: grpc.StatusCode.OUT_OF_RANGE,
    Reason.RUN_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.RUN_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.MODEL_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.OPTIMIZER_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.OPTIMIZER_UNSUPPORTED: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.REPLACED: grpc.StatusCode.ABORTED,
    Reason.NOT_JOINED: grpc.StatusCode.ABORTED,
    Reason.STEP_GAP: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.DIVERGED: grpc.StatusCode.ABORTED,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.NOT_READY: grpc.StatusCode.UNAVAILABLE,
    Reason.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Reason.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.LIMIT_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.TOO_SLOW: grpc.StatusCode.ABORTED,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
    Reason.SHARD_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
}


# ---- models and optimizers ------------------------------------------------------------------


def layout_to_proto(layout: Layout) -> list[pb.TensorSpec]:
    return [
        pb.TensorSpec(
            name=spec.name,
            kind=pb.TensorSpec.Kind.Name(spec.kind.value),
            dtype=spec.dtype,
            shape=spec.shape,
            aliases=spec.aliases,
        )
        for spec in layout.specs
    ]


def layout_from_proto(tensors: Any) -> Layout:
    """Raises a BAD_REQUEST refusal for what Layout refuses, an unknown kind, or too much of anything."""
    if not 0 < len(tensors) <= _MAX_TENSORS:
        raise refusal(Reason.BAD_REQUEST, f"a model of {len(tensors)} tensors; 1 to {_MAX_TENSORS} are possible")
    specs, num_names = [], 0
    for tensor in tensors:
        _check_text("a tensor's name", tensor.name)
        if tensor.kind not in Kind._value2member_map_:
            raise refusal(Reason.BAD_REQUEST, f"tensor '{tensor.name}' has no kind")
        _check_text("a dtype", tensor.dtype)
        if len(tensor.shape) > _MAX_DIMENSIONS:
            what = f"tensor '{tensor.name}' has {len(tensor.shape)} dimensions; at most {_MAX_DIMENSIONS} are possible"
            raise refusal(Reason.BAD_REQUEST, what)
        num_names += 1 + len(tensor.aliases)
        if num_names > _MAX_NAMES:
            raise refusal(Reason.BAD_REQUEST, f"more than {_MAX_NAMES} names of tensors")
        for alias in tensor.aliases:
            _check_text("a tensor's name", alias)
        spec = TensorSpec(tensor.name, Kind(tensor.kind), tensor.dtype, tuple(tensor.shape), tuple(tensor.aliases))
        specs.append(spec)
    return Layout(specs)


def _check_text(what: str, text: str) -> None:
    """Names are shown to people and written to logs: no control characters, no novels."""
    if len(text) > _MAX_NAME or not text.isprintable():
        raise refusal(
            Reason.BAD_REQUEST,
            f"{what} of {len(text)} characters, {text[:40]!a}: at most {_MAX_NAME}, all of them printable",
        )


def struct(values: dict[str, Any]) -> Struct:
    message = Struct()
    message.update(values)
    return message


def from_struct(message: Struct) -> dict[str, Any]:
    """By hand: protobuf's own conversion is to JSON, which knows no infinity."""
    return {key: _from_value(value) for key, value in message.fields.items()}


def _from_value(value: Any) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return from_struct(value.struct_value)
    if kind == "list_value":
        return [_from_value(item) for item in value.list_value.values]
    return None if kind in (None, "null_value") else getattr(value, kind)


def hyperparameters_from_proto(groups: Any) -> list[Hyperparameters]:
    """Raises a BAD_REQUEST refusal for NaN and Inf, and for more than any optimizer has."""
    left = _fewer(_MAX_HYPERPARAMETERS, len(groups))
    for group in groups:
        left = _check_fields(group.fields, left)
    return [from_struct(group) for group in groups]


def _check_fields(fields: Any, left: int) -> int:
    left = _fewer(left, len(fields))
    for key, value in fields.items():
        _check_text("a hyperparameter's name", key)
        left = _check_value(key, value, left)
    return left


def _check_value(key: str, value: Any, left: int) -> int:
    """`left` less the items in `value`. Protobuf bounds the depth."""
    kind = value.WhichOneof("kind")
    if kind == "number_value" and not math.isfinite(value.number_value):
        raise refusal(Reason.BAD_REQUEST, f"hyperparameter {key} is not finite")
    if kind == "string_value":
        _check_text(f"hyperparameter {key}", value.string_value)
    elif kind == "struct_value":
        left = _check_fields(value.struct_value.fields, left)
    elif kind == "list_value":
        left = _fewer(left, len(value.list_value.values))
        for item in value.list_value.values:
            left = _check_value(key, item, left)
    return left


def _fewer(left: int, count: int) -> int:
    if count > left:
        raise refusal(Reason.BAD_REQUEST, f"more than {_MAX_HYPERPARAMETERS} hyperparameters")
    return left - count


def optimizer_to_proto(spec: OptimizerSpec) -> pb.Optimizer:
    groups = [
        pb.ParameterGroup(tensors=group.tensors, hyperparameters=struct(group.hyperparameters)) for group in spec.groups
    ]
    return pb.Optimizer(name=spec.name, groups=groups)


def optimizer_from_proto(message: pb.Optimizer, layout: Layout | None = None) -> OptimizerSpec:
    """With a layout, also checks that every tensor is a parameter and in one group only, and that there is one at all.
    Refuses BAD_REQUEST, as `hyperparameters_from_proto` does."""
    _check_text("an optimizer's name", message.name)
    num_groups = len(message.groups)
    if num_groups > _MAX_NAMES or num_groups + sum(len(group.tensors) for group in message.groups) > _MAX_NAMES:
        raise refusal(Reason.BAD_REQUEST, f"an optimizer of more than {_MAX_NAMES} groups and tensors")
    hyperparameters = hyperparameters_from_proto([group.hyperparameters for group in message.groups])
    groups = tuple(
        GroupSpec(tuple(group.tensors), values) for group, values in zip(message.groups, hyperparameters, strict=True)
    )
    if layout is not None:
        trained = {spec.name for spec in layout.specs if spec.kind is Kind.PARAMETER}
        for name in (name for group in groups for name in group.tensors):
            if name not in trained:
                raise refusal(
                    Reason.BAD_REQUEST,
                    f"the optimizer's tensor '{name}' is no parameter of the model, or in two groups",
                )
            trained.remove(name)
        if not any(group.tensors for group in groups):
            raise refusal(
                Reason.BAD_REQUEST,
                f"there is nothing to train: the optimizer holds none of the model's {len(trained)} parameters",
                fix="give it at least one parameter that requires a gradient; buffers and frozen tensors are none",
            )
    return OptimizerSpec(message.name, groups)


# ---- the small fields of a worker's messages ---------------------------------------------------------


def check_header(kind: str, header: Any) -> None:
    """Raises a BAD_REQUEST refusal for texts nobody would write and times that cannot be. Models, optimizers and
    hyperparameters are checked where they are read."""
    check = _CHECKS.get(kind)
    if check is not None:
        check(header)


def _check_join(join: pb.Join) -> None:
    if not -1 <= join.rank < _MAX_RANK:
        raise refusal(Reason.RANK_OUT_OF_RANGE, f"no rank {join.rank}: -1 to {_MAX_RANK - 1} are possible")
    for field in ("run", "host", "device", "program_version", "process"):
        _check_text(f"Join.{field}", getattr(join, field))


def _check_contribution(contribution: pb.Contribution) -> None:
    _check_codec(contribution)
    _check_seconds("compute_s", contribution.compute_s)
    _check_seconds("transfer_s", contribution.transfer_s)


def _check_codec(announcement: Any) -> None:
    _check_text("a codec's name", announcement.codec)


def _check_leave(leave: pb.Leave) -> None:
    if len(leave.metrics) > _MAX_METRICS:
        raise refusal(Reason.BAD_REQUEST, f"{len(leave.metrics)} metrics; at most {_MAX_METRICS} are possible")
    for name in leave.metrics:
        _check_text("a metric's name", name)


def check_beat(beat: pb.Beat) -> None:
    """Raises a BAD_REQUEST refusal."""
    _check_text("Beat.run", beat.run)
    _check_text("Beat.process", beat.process)


def _check_seconds(field: str, value: float) -> None:
    if not 0 <= value <= _MAX_SECONDS:
        raise refusal(Reason.BAD_REQUEST, f"{field} is {value}; it is 0 to {_MAX_SECONDS:g}")


_CHECKS: dict[str, Callable[[Any], None]] = {
    "join": _check_join,
    "model": lambda model: _check_text("a codec's name", model.answer_codec),
    "begin": _check_codec,
    "contribution": _check_contribution,
    "finish": lambda finish: _check_seconds("transfer_s", finish.transfer_s),
    "leave": _check_leave,
}


# ---- shared memory ------------------------------------------------------------------------------


def segment_to_proto(address: SegmentAddress | None) -> pb.Segment | None:
    if address is None:
        return None
    return pb.Segment(
        host=address.host,
        pid=address.pid,
        descriptor=address.descriptor,
        label=address.label,
        num_bytes=address.num_bytes,
    )


def segment_from_proto(message: pb.Segment) -> SegmentAddress:
    return SegmentAddress(message.host, message.pid, message.descriptor, message.label, message.num_bytes)


# ---- refusals ---------------------------------------------------------------------------------


def refusal_to_status(error: ParamServerError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """(status code, message, trailing metadata) for an error that has a reason."""
    reason = error.reason or Reason.BAD_REQUEST
    fix = error.fix.encode("ascii", "replace").decode().replace("\n", " ")
    metadata = (("ps-reason", reason.value), ("ps-fix", fix[:_MAX_TEXT]))
    # The status message travels percent-encoded: up to three bytes for each of UTF-8.
    details = error.message.encode()[: _MAX_TEXT if error.message.isascii() else _MAX_TEXT // 2]
    return STATUS_OF_REASON[reason], details.decode(errors="ignore"), metadata


def refusal_from_status(error: grpc.RpcError) -> ParamServerError | None:
    """The refusal a failed call carries; None when the call failed for another cause."""
    metadata = dict(error.trailing_metadata() or ())
    text = metadata.get("ps-reason")
    if text is None:
        return None
    try:
        reason = Reason(text)
    except ValueError:
        return UnreachableError(f"the server refused with the unknown reason {text}: {error.details()}")
    return refusal(reason, error.details() or text, fix=metadata.get("ps-fix", ""))
