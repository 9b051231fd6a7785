"""Between the proto's messages and our own types; the only place that knows both.

Everything that comes from the network is checked here: a value outside its range is a
BAD_REQUEST refusal that names field, limit and value.
"""

from __future__ import annotations

import math
from typing import Any

import grpc
from google.protobuf.struct_pb2 import Struct

from ..proto import parameter_server_pb2 as pb
from .errors import ParamServerError, Reason, UnreachableError, refusal
from .layout import Kind, Layout, TensorSpec
from .optimizers import GroupSpec, Hyperparameters, OptimizerSpec

SERVICE = "paramserver.v1.ParameterServer"
_MAX_TENSORS = 1_000_000
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
    """Raises a BAD_REQUEST refusal for what Layout refuses, an unknown kind, or too many tensors."""
    if not 0 < len(tensors) <= _MAX_TENSORS:
        raise refusal(Reason.BAD_REQUEST, f"a model of {len(tensors)} tensors; 1 to {_MAX_TENSORS} are possible")
    specs = []
    for tensor in tensors:
        if tensor.kind not in Kind._value2member_map_:
            raise refusal(Reason.BAD_REQUEST, f"tensor '{tensor.name}' has no kind")
        spec = TensorSpec(tensor.name, Kind(tensor.kind), tensor.dtype, tuple(tensor.shape), tuple(tensor.aliases))
        specs.append(spec)
    return Layout(specs)


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
    """Raises a BAD_REQUEST refusal for NaN and Inf."""
    for group in groups:
        for key, value in group.fields.items():
            if not _is_finite(value):
                raise refusal(Reason.BAD_REQUEST, f"hyperparameter {key} is not finite")
    return [from_struct(group) for group in groups]


def _is_finite(value: Any) -> bool:
    kind = value.WhichOneof("kind")
    if kind == "list_value":
        return all(_is_finite(item) for item in value.list_value.values)
    if kind == "struct_value":
        return all(_is_finite(item) for item in value.struct_value.fields.values())
    return kind != "number_value" or math.isfinite(value.number_value)


def optimizer_to_proto(spec: OptimizerSpec) -> pb.Optimizer:
    groups = [
        pb.ParameterGroup(tensors=group.tensors, hyperparameters=struct(group.hyperparameters)) for group in spec.groups
    ]
    return pb.Optimizer(name=spec.name, groups=groups)


def optimizer_from_proto(message: pb.Optimizer, layout: Layout | None = None) -> OptimizerSpec:
    """With a layout, also checks that every tensor is a parameter and in one group only."""
    groups = tuple(GroupSpec(tuple(g.tensors), from_struct(g.hyperparameters)) for g in message.groups)
    if layout is not None:
        trained = {spec.name for spec in layout.specs if spec.kind is Kind.PARAMETER}
        for name in (name for group in groups for name in group.tensors):
            if name not in trained:
                raise refusal(
                    Reason.BAD_REQUEST,
                    f"the optimizer's tensor '{name}' is no parameter of the model, or in two groups",
                )
            trained.remove(name)
    return OptimizerSpec(message.name, groups)


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
