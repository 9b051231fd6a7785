"""Splits the output of children into lines, and parses the JSON events among them.

A line that is a JSON object with an "event" is an event. Any other line is the user's output or a traceback.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...common.reporting.status import Status
from ...common.wire.json_text import read_json

_LEVELS = ("debug", "info", "warning", "error")
# The fields that the launcher reads of each event of its children. A test compares them with those that are sent.
READ = {
    "admitted": ("rank",),
    "evicted": ("rank",),
    "run_failed": ("rank", "reason", "exit_code"),
    "dashboard": ("url", "address"),
    "serve": ("url",),
    "listening": ("address",),
    "already_done": ("steps", "weights", "fix"),
    "training_started": ("workers",),
}
_MAX_LINE_BYTES = 1 << 20  # a longer one is cut, so that no child fills the launcher's memory


class LineSplitter:
    """Turns the bytes of a pipe into lines of text."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> list[str]:
        """Returns the lines that are complete. Empty data are the end, which completes the last line."""
        *complete, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > (_MAX_LINE_BYTES if data else 0):
            complete.append(self._partial)
            self._partial = b""
        return [_text(line) for line in complete]


def _text(line: bytes) -> str:
    # A progress bar redraws itself after carriage returns: its last state is the line.
    return line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]


@dataclass(frozen=True)
class Event:
    """One event of a child. `fields` are those that not every event has."""

    name: str
    level: str = "info"
    fields: dict[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any = "") -> Any:
        """Returns a field that this event has by `READ`."""
        assert key in READ[self.name], (self.name, key)
        return self.fields.get(key, default)

    @property
    def status(self) -> Status | None:
        """The run's status; None in other events, and where the fields are not a status's."""
        return Status.parse(self.fields) if self.name == "status" else None

    @property
    def text(self) -> str:
        """`joined rank=0 reason='first of 4'`; an exception's traceback is on the lines below."""
        fields = {name: value for name, value in self.fields.items() if name != "exception"}
        words = [self.name, *(f"{name}={_value_text(value)}" for name, value in fields.items())]
        if self.level in ("warning", "error", "critical"):
            words.insert(0, f"{self.level}:")
        traceback = self.fields.get("exception")
        return " ".join(words) + (f"\n{traceback}" if traceback else "")

    def is_at_least(self, level: str) -> bool:
        """Whether it is as important as `level`; a level of someone else's making always is."""
        return self.level not in _LEVELS or _LEVELS.index(self.level) >= _LEVELS.index(level)


def _value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return repr(text) if (isinstance(value, str) and (" " in text or not text)) or not text.isprintable() else text


def object_in(line: str | bytes) -> dict[str, Any]:
    """Returns the JSON object in a line, empty for any other line."""
    try:
        found = read_json(line, nan=True, big=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def parse_event(line: str) -> Event | None:
    """The event in a line, or None."""
    fields = object_in(line) if line.startswith("{") else {}
    if not isinstance(fields.get("event"), str):
        return None
    name, level = fields.pop("event"), str(fields.pop("level", "info"))
    for common in ("program", "timestamp"):
        fields.pop(common, None)
    return Event(name, level, fields)
