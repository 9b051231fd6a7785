"""Renders the lines of a job's children, and the position of a run among several. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from ...common.reporting.panel import RANK_COLOURS
from ...common.reporting.pictures.words import about
from ..plan.process import Child
from .events import Event

_LEVEL_STYLES = {"warning": "yellow", "error": "bold red", "critical": "bold red", "debug": "dim"}


def child_line(child: Child, line: str, event: Event | None, host: str = "") -> Text:
    """`[worker 2] ...`, or `[worker 2 on gpu1] ...`: an event as `name key=value`, any other line unchanged."""
    style = "bold" if child.role != "worker" else RANK_COLOURS[child.rank % len(RANK_COLOURS)]
    prefix = (f"[{child} on {host}] " if host else f"[{child}] ", style)
    if event is None:
        return Text.assemble(prefix, Text.from_ansi(line))
    return Text.assemble(prefix, (event_text(event), _LEVEL_STYLES.get(event.level, "")))


def event_text(event: Event) -> str:
    """Returns `joined rank=0 reason='first of 4'`; an exception's traceback is on the lines below."""
    fields = {name: value for name, value in event.fields.items() if name != "exception"}
    words = [event.name, *(f"{name}={_value_text(value)}" for name, value in fields.items())]
    if event.level in ("warning", "error", "critical"):
        words.insert(0, f"{event.level}:")
    traceback = event.fields.get("exception")
    return " ".join(words) + (f"\n{traceback}" if traceback else "")


def _value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return repr(text) if (isinstance(value, str) and (" " in text or not text)) or not text.isprintable() else text


@dataclass(frozen=True)
class Series:
    """Run `number` of `num_runs`; `took_s`: seconds of the runs before it."""

    number: int = 1
    num_runs: int = 1
    took_s: Sequence[float] = ()

    def text(self, run_s: float = 0.0, eta_s: float | None = None) -> str:
        """Returns `run 5 of 14, about 3 min to go`, empty for a single run.

        `run_s`, `eta_s`: seconds over and left of this run, None if unknown. Later runs are estimated by the mean of
        earlier ones, or by this one.
        """
        if self.num_runs == 1:
            return ""
        name, later = f"run {self.number} of {self.num_runs}", self.num_runs - self.number
        if not self.took_s and eta_s is None:
            return name
        each = sum(self.took_s) / len(self.took_s) if self.took_s else run_s + (eta_s or 0.0)
        left = max(0.0, each - run_s) if eta_s is None else eta_s
        return f"{name}, about {about(left + later * each)} to go"
