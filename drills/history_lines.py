"""Reads history files (common/reporting/history.py) into checked lines, and follows them. Pure.

A process that is killed during a write leaves a partial line. It is allowed as the last line of a file, and before the
`start` of the next process that writes to the file. That start is then on the same line. If a worker shares the file,
its lines may also follow the partial line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..common.registry import MODES, mode_anywhere
from ..common.wire.json_text import read_json
from ..common.wire.records import Row

# Fields of each operation by role, with their kinds (`_KINDS`); after "?", those that a line may lack. Other fields are
# not used.
FIELDS = {
    "server": {
        "start": "run:text server_incarnation mode:text version rows:rows options:values common:values "
        "? staleness:perhaps workers:perhaps skipped:list found:list",
        "join": "rank incarnation seq ? resumed:switch",
        "enter": "rank incarnation seq",
        "away": "rank incarnation seq",
        "back": "rank incarnation seq",
        "leave": "rank incarnation how:text ? finished:switch",
        "accept": "rank incarnation seq base_version version outcome:text num_steps num_batches "
        "? samples:perhaps part run_steps",
        "commit": "version contributions:triples members:ranks ? samples",
        "reply": "rank incarnation seq version outcome:text training_steps "
        "? last:switch weights:switch newer:switch reference",
        "snapshot": "version rows:rows",
        "control": "do:text ? done:switch name:text",
        "end": "version rows:rows ? begun:switch over:switch",
    },
    "worker": {
        "start": "run:text rank incarnation server_incarnation seq version",
        "send": "rank incarnation seq base_version num_steps num_batches ? samples:perhaps part",
        "replied": "rank incarnation seq version outcome:text",
        "end": "rank seq",
    },
}


_MOST = 2**63 - 1
MAX_LINE_BYTES = 64 << 20
_MAX_SHOWN = 100  # characters of a value


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= len(str(_MOST))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST


def _is_row(value: Any) -> bool:
    is_long = isinstance(value, list) and len(value) == len(Row._fields)
    return is_long and all(_is_whole(item) or (item is None and at == 2) for at, item in enumerate(value))


def _are_whole(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_whole, value))


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "": ("a whole number", _is_whole),
    "text": ("text", lambda value: isinstance(value, str)),
    "values": ("{name: value}", lambda value: isinstance(value, dict)),
    "ranks": ("[rank, ...]", _are_whole),
    "rows": (
        f"{{rank: [{', '.join(Row._fields)}]}}",
        lambda value: isinstance(value, dict) and all(map(_is_rank, value)) and all(map(_is_row, value.values())),
    ),
    "perhaps": ("a whole number or null", lambda value: value is None or _is_whole(value)),
    "switch": ("true or false", lambda value: isinstance(value, bool)),
    "list": ("a list", lambda value: isinstance(value, list)),
    "triples": (
        "[[r, i, s], ...]",
        lambda value: isinstance(value, list) and all(_are_whole(item) and len(item) == 3 for item in value),
    ),
}


@dataclass(frozen=True)
class Problem:
    """One mistake in a history file, and its line."""

    file: str
    number: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.message}"


@dataclass(frozen=True)
class Line:
    """One operation. `fields` has the required fields; whole numbers are int."""

    file: str
    number: int  # from 1
    role: str
    op: str
    fields: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]

    @property
    def rows(self) -> dict[int, Row]:
        """`rows` with ranks as numbers, because keys in JSON are strings."""
        return {int(rank): Row(*row) for rank, row in self.fields["rows"].items()}

    @property
    def seqs(self) -> dict[int, int]:
        return {rank: row.seq for rank, row in self.rows.items()}


def read_lines(file: str, lines: Iterable[bytes]) -> tuple[list[Line], list[Problem]]:
    """Returns the operations of a history file, in order, and the problems of lines that cannot be read.

    `lines`: as read from a binary file, with line ends.
    """
    found: list[Line] = []
    problems: list[Problem] = []
    for number, raw in enumerate(lines, 1):
        if len(raw) > MAX_LINE_BYTES:
            problems.append(
                Problem(file, number, f"a line of more than {MAX_LINE_BYTES:,} bytes: the rest is not read")
            )
            break
        if not raw.strip():
            continue
        fields, is_torn = _parse(raw)
        if fields is None:
            if raw.endswith(b"\n"):
                problems.append(Problem(file, number, "not a JSON object"))
            continue  # without an end: the last line of the file
        error = _error_of(fields)
        if error is None and is_torn and fields["op"] != "start" and fields["role"] == "server":
            error = f"a partial line is followed by {fields['op']}: only a start may follow a partial line"
        if error is not None:
            problems.append(Problem(file, number, error))
        else:
            found.append(Line(file, number, fields["role"], fields["op"], fields))
    return found, problems


class Follower:
    """Follows a history: calls `_on_<operation>` for one line after another, for the operations that a subclass has.

    The user names the file of a mode. Its path in the history is not used, because a history must not run code.
    """

    def __init__(self, modes: Iterable[str] = ()) -> None:
        """`modes`: modes in the user's files, `FILE.py:NAME`, beside the installed ones."""
        self.problems: list[Problem] = []
        self._modes = {**{mode: mode for mode in MODES.names()}, **{mode_anywhere(mode): mode for mode in modes}}
        self._line: Line  # the file that is followed

    def feed(self, line: Line) -> None:
        self._line = line
        if (follow := getattr(self, f"_on_{line.op}", None)) is not None:
            follow(line)

    def _report(self, *messages: str | None) -> None:
        self.problems += [Problem(self._line.file, self._line.number, message) for message in messages if message]

    def _mode_of(self, fields: dict[str, Any]) -> str | None:
        """Returns the mode that a start names; None for an unknown mode."""
        return self._modes.get(mode_anywhere(fields["mode"]))


def shown(value: Any) -> str:
    """Returns a value as a part of a sentence."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _parse(raw: bytes) -> tuple[dict[str, Any] | None, bool]:
    """Returns the object in a line, and whether a partial line precedes it."""
    for begin in (0, raw.rfind(b'{"op":')):
        try:
            fields = read_json(raw[begin:], nan=True, big=True) if begin >= 0 else None
        except ValueError:  # also UnicodeDecodeError
            continue
        if isinstance(fields, dict):
            return fields, begin > 0
    return None, True


def _error_of(fields: dict[str, Any]) -> str | None:
    """Returns what is wrong with the form of a line, as a sentence."""
    role, op = fields.get("role"), fields.get("op")
    needed = FIELDS.get(str(role), {}).get(str(op))
    if needed is None:
        op, role = str(op)[:_MAX_SHOWN], str(role)[:_MAX_SHOWN]
        return f"operation {op!r} of role {role!r} is unknown in a history (common/reporting/history.py)"
    is_optional = False
    for key, _, kind in (word.partition(":") for word in needed.split()):
        if key == "?":
            is_optional = True
            continue
        if key not in fields:
            if is_optional:
                continue
            return f"{op} without '{key}'"
        text, is_right = _KINDS[kind]
        if not is_right(fields[key]):
            return f"{op} with '{key}' {shown(fields[key])}: it must be {text}"
    return None
