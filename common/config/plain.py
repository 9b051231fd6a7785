"""Reads a value that stands without quotes, by the rules of YAML 1.2. Pure.

A file, a variable, a flag and --set give text. `Plain` keeps that text until the field is known: a field of text gets
it as written (`007`, `1.10`, `no`), any other field the number, switch or null that it means. YAML 1.1, PyYAML's
default, reads 010 as eight, 1:30 as ninety, 1_0 as ten and `no` as a switch. Here they are text, and a number's field
takes only leading zeros, so that 010 is ten.
"""

from __future__ import annotations

import re
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

_CONSTANTS = {"": None, "~": None, "true": True, "false": False, "null": None}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_ZEROS = re.compile(r"0+[0-9]+")  # the rank of a job array, such as 007


class Plain(str):
    """A value as written, without quotes."""

    def value(self) -> Any:
        """Return the number, switch, null or text that it means."""
        if self in _CONSTANTS or self in ("True", "TRUE", "False", "FALSE", "Null", "NULL"):
            return _CONSTANTS[self.lower()]
        if _INT.fullmatch(self):
            return int(self, 0) if len(self) < 4000 else str(self)  # Python's limit is 4300 digits
        if found := _NOT_FINITE.fullmatch(self):
            return float((found[1] or "") + ("inf" if found[2] else "nan"))
        return float(self) if _FLOAT.fullmatch(self) else str(self)


def meant(value: Any, *, as_text: bool = False) -> Any:
    """Return a value in which each `Plain` is replaced by what YAML 1.2 reads in it, or by its text."""
    match value:
        case Plain():
            return str(value) if as_text else value.value()
        case list():
            return [meant(item, as_text=as_text) for item in value]
        case dict():
            return {str(key): meant(item, as_text=as_text) for key, item in value.items()}
    return value


def types_in(annotation: Any) -> set[Any]:
    """Return the types of an annotation's values: int and None for `int | None`, str for `dict[str, str]`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return types_in(arguments[0])
    if origin is Literal:
        return {type(argument) for argument in arguments}
    if origin in (Union, UnionType, list, tuple, dict):
        inner = arguments[1:] if origin is dict else arguments
        return {kind for argument in inner if argument is not ... for kind in types_in(argument)}
    return {annotation}


def for_field(value: Any, annotation: Any) -> Any:
    """Return a value as a field of this type wants it. Raises ValueError for text where it wants a number or switch."""
    kinds = types_in(annotation)
    if isinstance(value, Plain) and NoneType in kinds and value.value() is None:
        return None
    value = meant(value, as_text=kinds <= {str, NoneType})
    if isinstance(value, bool) and bool not in kinds and Any not in kinds:
        raise ValueError(f"is not a switch, got {value}")
    if isinstance(value, str) and not kinds & {str, Any} and not (bool not in kinds and _ZEROS.fullmatch(value)):
        if bool in kinds:
            raise ValueError(f"is a switch, true or false, got {value!r}")
        if kinds <= {int, float, NoneType}:
            kind = "number such as 0.1" if float in kinds else "integer such as 12"
            raise ValueError(f"input should be a valid {kind}, got {value!r}")
    return value
