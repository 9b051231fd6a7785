"""Hyperparameters and other settings of any form as protobuf's `Struct`. Those of another process are checked when they
are read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.struct_pb2 import Struct

from ..errors import bad_request
from .checks import check_text

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
