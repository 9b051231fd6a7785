"""Reads history files (common/reporting/history.py) into checked lines, and follows them. Pure.

A process that is killed during a write leaves a partial line. It is allowed as the last line of a file, and before the
`start` of the next process that writes to the file. That start is then on the same line. If a worker shares the file,
its lines may also follow the partial line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field, InstanceOf, ValidationError, create_model

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


MAX_LINE_BYTES = 64 << 20
_MAX_SHOWN = 100  # characters of a value
_Whole = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
_Rank = Annotated[str, Field(pattern="^[0-9]{1,19}$")]  # a key in JSON is a string
_KINDS: dict[str, tuple[str, Any]] = {
    "": ("a whole number", _Whole),
    "text": ("text", InstanceOf[str]),
    "values": ("{name: value}", InstanceOf[dict]),
    "ranks": ("[rank, ...]", list[_Whole]),
    "rows": (
        f"{{rank: [{', '.join(Row._fields)}]}}",
        dict[_Rank, tuple[_Whole, _Whole, _Whole | None, _Whole, _Whole]],
    ),
    "perhaps": ("a whole number or null", _Whole | None),
    "switch": ("true or false", InstanceOf[bool]),
    "list": ("a list", InstanceOf[list]),
    "triples": ("[[r, i, s], ...]", list[tuple[_Whole, _Whole, _Whole]]),
}


def _form(op: str, fields: str) -> type[BaseModel]:
    """Returns the form of the lines of an operation, from its fields in `FIELDS`."""
    needed, _, optional = fields.partition("?")
    found: dict[str, Any] = {}
    for words, default in ((needed, ...), (optional, None)):
        for name, _, kind in (word.partition(":") for word in words.split()):
            text, type_ = _KINDS[kind]
            found[name] = type_, Field(default, description=text)
    return create_model(op, **found)


_FORMS = {(role, op): _form(op, fields) for role, ops in FIELDS.items() for op, fields in ops.items()}


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
            message = f"a line of more than {MAX_LINE_BYTES:,} bytes: the rest is not read"
            problems.append(Problem(file, number, message))
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
    role, op = str(fields.get("role")), str(fields.get("op"))
    form = _FORMS.get((role, op))
    if form is None:
        op, role = op[:_MAX_SHOWN], role[:_MAX_SHOWN]
        return f"operation {op!r} of role {role!r} is unknown in a history (common/reporting/history.py)"
    try:
        form.model_validate(fields)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        if name not in fields:
            return f"{op} without '{name}'"
        return f"{op} with '{name}' {shown(fields[name])}: it must be {form.model_fields[name].description}"
    return None
