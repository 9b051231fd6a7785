"""Conversion between protobuf messages and our types: models, optimizers and refusals.

The functions that read a message check it. A value outside its range is a BAD_REQUEST refusal that names the field, the
limit and the value.
"""

from __future__ import annotations

import re
from typing import Any

import grpc

from ...proto import parameter_server_pb2 as pb
from ..errors import ParamServerError, Reason, UnreachableError, bad_request, refusal, shown
from ..tensors.layout import Kind, Layout, TensorSpec
from ..tensors.optimizers import GroupSpec, OptimizerSpec, Reduction, TableSpec
from ..version import PROGRAM_VERSION, PROTOCOL_VERSION
from .checks import check_text, hyperparameters_from_proto, struct

SERVICE = f"paramserver.v{PROTOCOL_VERSION}.ParameterServer"
OTHER_PROTOCOL = "another protocol: "  # begins the message to a caller of an older or a newer one
# Limits on one message. They are far beyond real models, and bound the time to read a message.
_MAX_TENSORS = 100_000
_MAX_DIMENSIONS = 64  # torch's own limit
_MAX_NAMES = 200_000  # of tensors and aliases
_MAX_TABLES = 1_000
_MAX_TEXT = 2_000  # bytes: gRPC limits all metadata of a call to 8 KiB by default


# ---- models and optimizers ------------------------------------------------------------------


def other_protocol(method: str) -> str | None:
    """The message to the caller of this method; None for one of this protocol, or of another service."""
    service = method.removeprefix("/").partition("/")[0]
    found = re.fullmatch(r"paramserver\.v(\d{1,9})\.ParameterServer", service)
    if found is None or service == SERVICE:
        return None
    return (
        f"{OTHER_PROTOCOL}the caller speaks version {found[1]}, and this ps-server (paramserver {PROGRAM_VERSION}) "
        f"version {PROTOCOL_VERSION}"
    )


def layout_to_proto(layout: Layout) -> list[pb.TensorSpec]:
    """Return the tensors of a layout as messages."""
    return [
        pb.TensorSpec(
            name=spec.name,
            kind=pb.TensorSpec.Kind.Name(spec.kind.value),
            dtype=spec.dtype,
            shape=spec.shape,
            aliases=spec.aliases,
            averaged=spec.kind is Kind.BUFFER and spec.averaged,
        )
        for spec in layout.specs
    ]


def layout_from_proto(tensors: Any) -> Layout:
    """Return the layout of these TensorSpec messages.

    Raises a BAD_REQUEST refusal for an unknown kind, a count above its limit, or specs that Layout refuses.
    """
    if not 0 < len(tensors) <= _MAX_TENSORS:
        raise bad_request(f"a model of {len(tensors)} tensors; 1 to {_MAX_TENSORS} are possible")
    specs, num_names = [], 0
    for tensor in tensors:
        check_text("a tensor's name", tensor.name)
        if tensor.kind not in Kind._value2member_map_:
            raise bad_request(f"tensor '{tensor.name}' has no kind")
        check_text("a dtype", tensor.dtype)
        if len(tensor.shape) > _MAX_DIMENSIONS:
            dimensions = f"{len(tensor.shape)} dimensions; at most {_MAX_DIMENSIONS} are possible"
            raise bad_request(f"tensor '{tensor.name}' has {dimensions}")
        num_names += 1 + len(tensor.aliases)
        if num_names > _MAX_NAMES:
            raise bad_request(f"more than {_MAX_NAMES} names of tensors")
        for alias in tensor.aliases:
            check_text("a tensor's name", alias)
        kind = Kind(tensor.kind)
        is_averaged = tensor.averaged or kind is not Kind.BUFFER
        shape, aliases = tuple(tensor.shape), tuple(tensor.aliases)
        specs.append(TensorSpec(tensor.name, kind, tensor.dtype, shape, aliases, is_averaged))
    return Layout(specs)


def optimizer_to_proto(spec: OptimizerSpec) -> pb.Optimizer:
    """Return the message of an optimizer."""
    groups = [
        pb.ParameterGroup(tensors=group.tensors, hyperparameters=struct(group.hyperparameters)) for group in spec.groups
    ]
    tables = [
        pb.Table(
            name=table.name, num_rows=table.num_rows, dim=table.dim, dtype=table.dtype, init_std=table.init_std,
            optimizer=table.optimizer, hyperparameters=struct(table.hyperparameters),
        )
        for table in spec.tables
    ]  # fmt: skip
    return pb.Optimizer(name=spec.name, groups=groups, tables=tables, sums=spec.reduction == "sum")


def optimizer_from_proto(message: pb.Optimizer, layout: Layout | None = None) -> OptimizerSpec:
    """Return the optimizer of a message. Raises a BAD_REQUEST refusal, as `hyperparameters_from_proto` does.

    With a layout, this also refuses a tensor that is not a parameter or is in two groups, and an optimizer without any
    parameter.
    """
    check_text("an optimizer's name", message.name)
    num_groups = len(message.groups)
    if num_groups > _MAX_NAMES or num_groups + sum(len(group.tensors) for group in message.groups) > _MAX_NAMES:
        raise bad_request(f"an optimizer of more than {_MAX_NAMES} groups and tensors")
    hyperparameters = hyperparameters_from_proto([group.hyperparameters for group in message.groups])
    groups = tuple(
        GroupSpec(tuple(group.tensors), values) for group, values in zip(message.groups, hyperparameters, strict=True)
    )
    if layout is not None:
        trained = {spec.name for spec in layout.specs if spec.kind is Kind.PARAMETER}
        for name in (name for group in groups for name in group.tensors):
            if name not in trained:
                raise bad_request(
                    f"the optimizer's tensor '{name}' is not a parameter of the model, or is in two groups"
                )
            trained.remove(name)
        if not any(group.tensors for group in groups):
            raise bad_request(
                f"there is nothing to train: the optimizer holds none of the model's {len(trained)} parameters",
                fix="give it at least one parameter that requires a gradient, not only buffers and frozen tensors",
            )
    reduction: Reduction = "sum" if message.sums else "mean"
    return OptimizerSpec(message.name, groups, _tables_from_proto(message.tables), reduction)


def _tables_from_proto(tables: Any) -> tuple[TableSpec, ...]:
    if len(tables) > _MAX_TABLES or len({table.name for table in tables}) < len(tables):
        raise bad_request(f"{len(tables)} tables of rows; at most {_MAX_TABLES}, each with its own name")
    for table in tables:
        for text in (table.name, table.dtype, table.optimizer):
            check_text("a table's name, dtype or optimizer", text)
    hyperparameters = hyperparameters_from_proto([table.hyperparameters for table in tables])
    return tuple(
        TableSpec(
            table.name, table.num_rows, table.dim, table.dtype, table.init_std, table.optimizer, values,
            first=0, end=table.num_rows,
        )
        for table, values in zip(tables, hyperparameters, strict=True)
    )  # fmt: skip


# ---- refusals -------------------------------------------------------------------------------------


def refusal_to_status(error: ParamServerError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Return (status code, message, trailing metadata) of an error that has a reason."""
    reason = error.reason or Reason.BAD_REQUEST
    fix = error.fix.encode("ascii", "replace").decode().replace("\n", " ")
    metadata = (("ps-reason", reason.value), ("ps-fix", fix[:_MAX_TEXT]))
    # gRPC percent-encodes the status message: each byte of UTF-8 takes up to three bytes.
    details = error.message.encode()[: _MAX_TEXT if error.message.isascii() else _MAX_TEXT // 2]
    return grpc.StatusCode[reason.status], details.decode(errors="ignore"), metadata


def refusal_from_status(error: grpc.RpcError) -> ParamServerError | None:
    """Return the refusal that a failed call carries, or None if the call failed for another cause."""
    metadata = dict(error.trailing_metadata() or ())
    text = metadata.get("ps-reason")
    if text is None:
        return None
    reason = Reason.__members__.get(text)
    if reason is None:
        details = shown(error.details() or "", _MAX_TEXT)
        return UnreachableError(f"the server refused with the unknown reason {shown(text)}: {details}")
    return refusal(reason, shown(error.details() or text, _MAX_TEXT), fix=shown(metadata.get("ps-fix", ""), _MAX_TEXT))
