"""Reads the output of children, and shows it to people."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.text import Text

from ..common.config.cli import discard_from_now_on
from ..common.reporting.pictures.words import about
from ..common.reporting.report import RANK_COLOURS, PipeConsole, live_panel, status_line
from ..common.reporting.summary import Status
from ..common.reporting.worker_logs import MAX_LINES, log_file
from ..common.security import WEB_LOGS_VARIABLE, WEB_TOKEN_VARIABLE
from ..common.wire.json_text import read_json, to_json
from .plan.hosts import Child
from .supervise.supervisor import Finish

# ---- events --------------------------------------------------------------------------------------
# Splits the output of children into lines, and parses the JSON events among them.
#
# A line that is a JSON object with an "event" is an event. Any other line is the user's output or a traceback.


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


# ---- screen --------------------------------------------------------------------------------------
# Shows a job on standard error; results go to standard output.
#
# On a terminal, lines of children scroll above a live table. Without one there is a compact line every few seconds.
# As JSON, each line is one object for a program. Once the output is gone (`ps-launch 2>&1 | head`), a screen reports
# that and shows nothing more: the job must end.


_MAX_LINES_HELD = 200
_NUM_LAST_LINES = 20  # of each process
_LEVEL_STYLES = {"warning": "yellow", "error": "bold red", "critical": "bold red", "debug": "dim"}


def child_line(child: Child, line: str, event: Event | None, host: str = "") -> Text:
    """`[worker 2] ...`, or `[worker 2 on gpu1] ...`: an event as `name key=value`, any other line unchanged."""
    style = "bold" if child.role != "worker" else RANK_COLOURS[child.rank % len(RANK_COLOURS)]
    prefix = (f"[{child} on {host}] " if host else f"[{child}] ", style)
    if event is None:
        return Text.assemble(prefix, Text.from_ansi(line))
    return Text.assemble(prefix, (event.text, _LEVEL_STYLES.get(event.level, "")))


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


@dataclass(eq=False)
class Screen:
    """Shows one run on standard error, until that is gone: lines, and a status line at most every `interval_s`."""

    hosts: Mapping[Child, str]
    on_lost: Callable[[], None]  # called when writing fails because the reader of the output is gone
    interval_s: float = 2.0
    series: Series = field(default_factory=Series)

    def __post_init__(self) -> None:
        self._is_lost = False
        self._console = PipeConsole(stderr=True)
        self._shown, self._shown_at = "", float("-inf")
        self._num_lines = 0
        self._last_lines: dict[Child, deque[tuple[int, Text]]] = {}  # with their numbers among all lines

    def note(self, event: str, sentence: str, level: str = "info", **fields: object) -> None:
        """Show what the launcher did or found. `fields`: the same for programs."""
        style = _LEVEL_STYLES.get(level, "bold")
        self._print(Text.assemble(("ps-launch: ", style), sentence))

    def page(self, address: str) -> None:
        """Show a page's address, with its token to the person at a terminal only: other output is stored."""
        token = os.environ.get(WEB_TOKEN_VARIABLE)
        if sys.stderr.isatty() and token:  # the console may believe so of a file, by FORCE_COLOR
            address += f"?token={token}"
        elif token:
            address += f"; to control the run there, set {WEB_TOKEN_VARIABLE} before the start and add ?token=..."
        self.note("dashboard", address)

    def line(self, child: Child, line: str, event: Event | None) -> None:
        """Show a line of a child."""
        if event is not None and event.name == "training_started" and child.role == "server":
            num = event.get("workers")
            self.note(event.name, "1 worker joined" if num == 1 else f"{num} workers joined")
            return
        text = child_line(child, line, event, self.hosts.get(child, ""))
        self._num_lines += 1
        self._last_lines.setdefault(child, deque(maxlen=_NUM_LAST_LINES)).append((self._num_lines, text))
        self._print_line(text)

    def status(self, line: str, status: Status, now: float) -> None:
        """Show the run's status; `line`: as reported."""
        # A tenth early is in time: the server's interval and this one have no common clock.
        text = status_line(status, self._job(status))
        if now - self._shown_at >= 0.9 * self.interval_s and text != self._shown:
            self._print(Text(text))
            self._shown, self._shown_at = text, now

    def _job(self, status: Status) -> str:
        return self.series.text(status.elapsed_s, status.eta_s)

    def is_down(self, child: Child) -> None:
        """The process whose status is shown has ended."""

    def tick(self) -> None:
        """Refresh the screen."""

    def failure(self, finish: Finish) -> None:
        """Show how a job failed, after the last lines of the process where they have scrolled away."""
        lines = self._last_lines.get(finish.culprit) if finish.culprit is not None else None
        if lines and self._num_lines - lines[-1][0] > _NUM_LAST_LINES // 2:
            heading = Text(f"---- last lines of {finish.culprit} ".ljust(60, "-"))
            self._print(Text("\n").join([heading, *(line for _, line in lines), Text("-" * 60)]))
        self.note("failed", finish.reason, "error")

    def close(self) -> None:
        """Restore the terminal."""

    def _print_line(self, text: Text) -> None:
        self._print(text)

    def _print(self, text: Text) -> None:
        if self._console.is_terminal:
            self._show(lambda: self._console.print(text))
        else:  # no width, no colours: as it is, and a hundred times faster
            self._show(lambda: print(text.plain, file=sys.stderr, flush=True))

    def _show(self, show: Callable[[], object]) -> None:
        if self._is_lost:
            return
        try:
            show()
        except OSError:  # EPIPE, or EIO from a terminal that was closed
            self._is_lost = True
            discard_from_now_on(2)
            self.on_lost()


class LiveScreen(Screen):
    """A terminal: lines scroll above a table that stays."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._latest: Status | None = None
        self._is_drawn = True
        self._lines: list[Text] = []  # not yet shown
        self._live = live_panel(
            self._console, lambda: self._latest, job=lambda: self._job(self._latest) if self._latest else ""
        )  # refreshed from `tick`
        self._show(self._live.start)

    def note(self, event: str, sentence: str, level: str = "info", **fields: object) -> None:
        self._flush()
        super().note(event, sentence, level)

    def _print_line(self, text: Text) -> None:
        # Drawing the table again for each line would make a chatty child wait.
        self._lines.append(text)
        if len(self._lines) >= _MAX_LINES_HELD:
            self._flush()

    def status(self, line: str, status: Status, now: float) -> None:
        self._latest, self._is_drawn = status, False

    def is_down(self, child: Child) -> None:
        is_over = self._latest is not None and 0 < self._latest.steps <= self._latest.step
        if self._latest is not None and not is_over:
            self._latest, self._is_drawn = self._latest.model_copy(update={"waiting": f"the {child} is down"}), False

    def tick(self) -> None:
        self._flush()
        if not self._is_drawn:
            self._show(self._live.refresh)
            self._is_drawn = True

    def failure(self, finish: Finish) -> None:
        self.close()
        super().failure(finish)

    def close(self) -> None:
        self._flush()
        self._show(self._live.stop)

    def _flush(self) -> None:
        if self._lines:
            self._print(Text("\n").join(self._lines))  # draws the table below them again, as it was
            self._lines.clear()


class JsonScreen(Screen):
    """One object per line, for programs: a child's event with its role and rank, or its output."""

    def note(self, event: str, sentence: str, level: str = "info", **fields: object) -> None:
        self._write({"event": event, "reason": sentence, "level": level, "program": "ps-launch", **fields})

    def page(self, address: str) -> None:
        pass  # the event `dashboard` of the server has the address

    def line(self, child: Child, line: str, event: Event | None) -> None:
        origin: dict[str, Any] = {"role": child.role, "rank": child.rank}
        origin |= {"host": self.hosts[child]} if child in self.hosts else {}
        fields = object_in(line) if event is not None else {"event": "output", "line": line}
        self._write({**fields, **origin, "rank": fields.get("rank", child.rank)})

    def status(self, line: str, status: Status, now: float) -> None:
        self._write(object_in(line))

    def _write(self, fields: dict[str, Any]) -> None:
        text = to_json({"timestamp": time.time(), **fields})
        self._show(lambda: print(text, file=sys.stderr, flush=True))


class WorkerLogs:
    """A file for each worker, in the folder that the environment names; without one, nothing."""

    def __init__(self) -> None:
        folder = os.environ.get(WEB_LOGS_VARIABLE)
        self._folder = Path(folder) if folder else None
        self._lines: dict[int, deque[str]] = {}
        self._num_written: dict[int, int] = {}  # lines in the file
        if self._folder is not None:
            for file in self._folder.glob("*"):  # of the run before
                file.unlink(missing_ok=True)

    def add(self, child: Child, line: str, event: Event | None) -> None:
        """Append a line. A file that is twice as long as what is shown is written anew."""
        if self._folder is None or child.role != "worker":
            return
        text = line if event is None else event.text
        lines = self._lines.setdefault(child.rank, deque(maxlen=MAX_LINES))
        lines.append(text)
        num = self._num_written.get(child.rank, 2 * MAX_LINES) + 1
        is_anew = num > 2 * MAX_LINES
        with suppress(OSError), log_file(self._folder, child.rank).open("w" if is_anew else "a") as file:
            file.write("".join(f"{line}\n" for line in (lines if is_anew else [text])))
            self._num_written[child.rank] = len(lines) if is_anew else num
