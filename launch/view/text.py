"""How a run looks: child lines, the status in one line or as a live table, a failure. No I/O."""

from __future__ import annotations

from collections import deque
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ...common.reporting.report import figure, share, status_figures
from ...common.reporting.status import Status, WorkerStatus
from ..plan.process import Child
from .events import Event

_CHILD_COLOURS = ("cyan", "magenta", "green", "blue", "yellow", "bright_cyan", "bright_magenta", "bright_green")
_LEVEL_STYLES = {"warning": "yellow", "error": "bold red", "critical": "bold red", "debug": "dim"}
_STATE_STYLES = {"waiting": "yellow", "gone": "red", "finished": "dim", "computing": "green"}
_NUM_LAST_LINES = 20


def child_line(child: Child, line: str, event: Event | None, host: str = "") -> Text:
    """`[worker 2] ...`, or `[worker 2 on gpu1] ...`: an event as `name key=value`, anything else as it was written."""
    style = "bold" if child.role == "server" else _CHILD_COLOURS[child.rank % len(_CHILD_COLOURS)]
    prefix = (f"[{child} on {host}] " if host else f"[{child}] ", style)
    if event is None:
        return Text.assemble(prefix, Text.from_ansi(line))
    return Text.assemble(prefix, (event_text(event), _LEVEL_STYLES.get(event.level, "")))


def event_text(event: Event) -> str:
    """`joined rank=0 reason='first of 4'`; an exception's traceback on the lines below."""
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
    return repr(text) if isinstance(value, str) and (" " in text or not text) else text


def status_panel(status: Status) -> RenderableType:
    """The live view. What must stay visible on a low terminal comes first."""
    bar = Table.grid()  # by itself a bar does not end its line
    if status.steps:
        bar.add_row(ProgressBar(total=status.steps, completed=status.step, width=60))
    waiting = status.waiting_reason()
    return Group(
        Text(""),
        Text.assemble((status.mode, "bold"), "  ", "  ".join(status_figures(status))),
        bar,
        Text(f"waiting: {waiting}" if waiting else "", style="yellow"),
        _workers(status),
        *_reasons(status),
    )


def _reasons(status: Status) -> list[Text]:
    """What who waits for, below the table: a line that is too long goes on in the next, and loses nothing."""
    waiting: dict[str, list[str]] = {}
    for worker in status.workers:
        if worker.waiting_for:
            waiting.setdefault(worker.waiting_for, []).append(str(worker.rank))
    return [Text(f"worker {', '.join(ranks)} waits for: {why}", style="dim") for why, ranks in waiting.items()]


def _workers(status: Status) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("worker", justify="right", no_wrap=True)
    table.add_column("state", min_width=9, no_wrap=True)
    for name in ("step", "lead", "loss", "samples/s", "compute", "transfer", "wait"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in status.workers:
        table.add_row(*_worker_row(worker, status.steps))
    return table


def _worker_row(worker: WorkerStatus, num_steps: int) -> list[RenderableType]:
    return [
        Text(str(worker.rank), style=_CHILD_COLOURS[worker.rank % len(_CHILD_COLOURS)]),
        Text(worker.state, style=_STATE_STYLES.get(worker.state, "")),
        f"{worker.step:,}/{num_steps:,}" if num_steps else f"{worker.step:,}",
        str(worker.lead),
        "-" if worker.loss is None else figure(worker.loss),
        f"{worker.samples_per_s:,.0f}",
        share(worker.compute_share),
        share(worker.transfer_share),
        share(worker.wait_share),
    ]


class LastLines:
    """The last lines of each child, to show again when it failed and they have scrolled away."""

    def __init__(self) -> None:
        self._num_shown = 0
        self._lines: dict[Child, deque[tuple[int, Text]]] = {}

    def add(self, child: Child, line: Text) -> None:
        self._num_shown += 1
        self._lines.setdefault(child, deque(maxlen=_NUM_LAST_LINES)).append((self._num_shown, line))

    def to_repeat(self, child: Child) -> list[Text]:
        """Its last lines; none of them when they are still the ones just above."""
        lines = self._lines.get(child, deque())
        foreign = self._num_shown - lines[-1][0] if lines else 0
        return [line for _, line in lines] if foreign > _NUM_LAST_LINES // 2 else []
