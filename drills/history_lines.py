"""Reads history files (common/reporting/history.py) into checked lines. Pure: bytes in, lines and problems out.

A process that is killed in the middle of a write leaves a line without an end. That is allowed as the
last line of a file, and before the `start` of the process that went on in the file; what the next
process writes then stands on the same line. A worker's lines may follow it too, where they share the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..common.wire.json_text import read_json

_NUMBER, _STEPS, _RANKS, _TRIPLES, _TEXT = "a whole number", "{rank: step}", "[rank, ...]", "[[r, i, s], ...]", "text"
_VALUES = "{name: value}"

# What every line of a kind must have, by role and operation; further fields are nobody's business here.
_FIELDS: dict[str, dict[str, dict[str, str]]] = {
    "server": {
        "start": {
            "run": _TEXT,
            "server_incarnation": _NUMBER,
            "mode": _TEXT,
            "version": _NUMBER,
            "steps": _STEPS,
            "options": _VALUES,
            "common": _VALUES,
        },
        "join": {"rank": _NUMBER, "incarnation": _NUMBER, "step": _NUMBER},
        "leave": {"rank": _NUMBER, "incarnation": _NUMBER, "how": _TEXT},
        "accept": {
            **dict.fromkeys(("rank", "incarnation", "step", "base_version", "version"), _NUMBER),
            "outcome": _TEXT,
        },
        "commit": {"version": _NUMBER, "contributions": _TRIPLES, "members": _RANKS},
        "reply": {**dict.fromkeys(("rank", "incarnation", "step", "version"), _NUMBER), "outcome": _TEXT},
        "snapshot": {"version": _NUMBER, "steps": _STEPS},
        "control": {"do": _TEXT},
        "end": {"version": _NUMBER, "steps": _STEPS},
    },
    "worker": {
        "start": {
            "run": _TEXT,
            **dict.fromkeys(("rank", "incarnation", "server_incarnation", "step", "version"), _NUMBER),
        },
        "send": dict.fromkeys(("rank", "incarnation", "step", "base_version"), _NUMBER),
        "replied": {**dict.fromkeys(("rank", "incarnation", "step", "version"), _NUMBER), "outcome": _TEXT},
        "end": {"rank": _NUMBER, "step": _NUMBER},
    },
}


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and where."""

    file: str
    number: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.message}"


@dataclass(frozen=True)
class Line:
    """One operation. `fields` has what the operation must have, with whole numbers as such."""

    file: str
    number: int  # from 1
    role: str
    op: str
    fields: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]

    @property
    def steps(self) -> dict[int, int]:
        """`steps` with ranks as numbers: JSON has texts as keys only."""
        return {int(rank): step for rank, step in self.fields["steps"].items()}


def read_lines(file: str, lines: Iterable[bytes]) -> tuple[list[Line], list[Problem]]:
    """The operations of a history file, in order, and what cannot be read of it.

    `lines` as a binary file gives them, with their ends.
    """
    found: list[Line] = []
    problems: list[Problem] = []
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        fields, is_torn = _parse(raw)
        if fields is None:
            if raw.endswith(b"\n"):
                problems.append(Problem(file, number, "not a JSON object"))
            continue  # without an end: the last line of the file
        error = _error_of(fields)
        if error is None and is_torn and fields["op"] != "start" and fields["role"] == "server":
            error = f"half a line, and then {fields['op']}: only a start may follow what a killed process left"
        if error is not None:
            problems.append(Problem(file, number, error))
        else:
            found.append(Line(file, number, fields["role"], fields["op"], fields))
    return found, problems


def _parse(raw: bytes) -> tuple[dict[str, Any] | None, bool]:
    """The object in a line, and whether half of another one stands before it."""
    for begin in (0, raw.rfind(b'{"op":')):
        try:
            fields = read_json(raw[begin:], nan=True, big=True) if begin >= 0 else None
        except ValueError:  # also UnicodeDecodeError
            continue
        if isinstance(fields, dict):
            return fields, begin > 0
    return None, True


def _error_of(fields: dict[str, Any]) -> str | None:
    """What is wrong with the form of a line."""
    role, op = fields.get("role"), fields.get("op")
    known = _FIELDS.get(role, {}) if isinstance(role, str) else {}
    needed = known.get(op) if isinstance(op, str) else None
    if needed is None:
        return f"operation {op!r} of role {role!r} is not one of a history (common/reporting/history.py)"
    for key, kind in needed.items():
        if key not in fields:
            return f"{op} without '{key}'"
        if not _is(kind, fields[key]):
            return f"{op} with '{key}' {fields[key]!r}: it must be {kind}"
    return None


def _is(kind: str, value: Any) -> bool:
    if kind == _NUMBER:
        return _is_whole(value)
    if kind == _TEXT:
        return isinstance(value, str)
    if kind == _VALUES:
        return isinstance(value, dict)
    if kind == _STEPS:
        return isinstance(value, dict) and all(rank.isdigit() and _is_whole(step) for rank, step in value.items())
    if kind == _RANKS:
        return isinstance(value, list) and all(map(_is_whole, value))
    return isinstance(value, list) and all(
        isinstance(item, list) and len(item) == 3 and all(map(_is_whole, item)) for item in value
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
