"""What children say: lines, the JSON events among them, and the two events with figures.

Any line that is a JSON object with an "event" is an event; any other one is the user's own
output or a traceback and stays as it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

_LEVELS = ("debug", "info", "warning", "error")
_MAX_LINE_BYTES = 1 << 20  # a longer one is cut, so that no child fills the launcher's memory


class LineSplitter:
    """Turns the bytes of a pipe into lines of text."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> list[str]:
        *complete, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > _MAX_LINE_BYTES:
            complete.append(self._partial)
            self._partial = b""
        return [_text(line) for line in complete]

    def rest(self) -> list[str]:
        """The last line, if it had no end."""
        partial, self._partial = self._partial, b""
        return [_text(partial)] if partial else []


def _text(line: bytes) -> str:
    # A progress bar redraws itself after carriage returns: its last state is the line.
    return line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]


@dataclass(frozen=True)
class Event:
    """One event of a child. `fields` leaves out what every event carries."""

    name: str
    level: str = "info"
    fields: dict[str, Any] = field(default_factory=dict)

    def is_at_least(self, level: str) -> bool:
        """Whether it is as important as `level`; a level of someone else's making always is."""
        return self.level not in _LEVELS or _LEVELS.index(self.level) >= _LEVELS.index(level)


def parse_event(line: str) -> Event | None:
    """The event in a line, or None."""
    if not line.startswith("{"):
        return None
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
        return None
    name, level = fields.pop("event"), str(fields.pop("level", "info"))
    for common in ("program", "timestamp"):
        fields.pop(common, None)
    return Event(name, level, fields)


@dataclass(frozen=True)
class WorkerStatus:
    """One worker at one moment. Shares are parts (0..1) of its time."""

    rank: int
    state: str = ""
    step: int = 0
    lead: int = 0
    loss: float | None = None
    samples_per_s: float = 0.0
    compute_share: float = 0.0
    transfer_share: float = 0.0
    wait_share: float = 0.0
    waiting_for: str = ""


@dataclass(frozen=True)
class Status:
    """The run at one moment. `step` is the smallest of the live workers."""

    mode: str = ""
    version: int = 0
    elapsed_s: float = 0.0
    step: int = 0
    steps: int = 0
    num_joined: int = 0
    workers: tuple[WorkerStatus, ...] = ()
    waiting: str = ""

    @property
    def loss(self) -> float | None:
        """Mean over the workers that have one."""
        losses = [worker.loss for worker in self.workers if worker.loss is not None]
        return sum(losses) / len(losses) if losses else None

    @property
    def samples_per_s(self) -> float:
        return sum(worker.samples_per_s for worker in self.workers)

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the pace so far; None before the first step."""
        if not self.step or not self.steps:
            return None
        return self.elapsed_s / self.step * max(0, self.steps - self.step)

    def waiting_reason(self) -> str:
        """What everyone, or else the first waiting worker, waits for; empty when nobody does."""
        if self.waiting:
            return self.waiting
        held = [worker for worker in self.workers if worker.waiting_for]
        if not held:
            return ""
        more = f" (and {len(held) - 1} more)" if len(held) > 1 else ""
        return f"worker {held[0].rank}: {held[0].waiting_for}{more}"


def parse_status(event: Event) -> Status | None:
    """The status in an event; None for other events and for fields that are not a status's."""
    if event.name != "status":
        return None
    try:
        rows = tuple(WorkerStatus(**_known(WorkerStatus, row)) for row in event.fields.get("workers", ()))
        return Status(**{**_known(Status, event.fields), "workers": rows})
    except (TypeError, ValueError, AttributeError):
        return None


def _known(kind: type, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that `kind` has, None meaning its default."""
    defaults = {name: info.default for name, info in kind.__dataclass_fields__.items()}  # type: ignore[attr-defined]
    return {
        name: _checked(name, value, defaults[name])
        for name, value in fields.items()
        if name in defaults and value is not None
    }


def _checked(name: str, value: Any, default: Any) -> Any:
    """`value` if it has the type of the field's default; figures arrive as int or float."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, str) != isinstance(value, str) or (not isinstance(default, str | tuple) and not number):
        raise TypeError(f"{name} is {value!r}")
    return value
