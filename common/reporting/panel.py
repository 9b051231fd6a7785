"""A run as a table that stays at the bottom of a terminal while lines scroll above it."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .metrics import Display, shown_of_workers
from .pictures.words import duration
from .report import PipeConsole, regions_text, status_metrics
from .status import Status, WorkerStatus, names_of

RANK_COLOURS = ("cyan", "magenta", "green", "blue", "yellow", "bright_cyan", "bright_magenta", "bright_green")
_LONG_S = 5.0  # in one state
_STATE_STYLES = {"waiting": "yellow", "gone": "red", "finished": "dim", "computing": "green"}


class TerminalConsole(PipeConsole):
    """A console on standard error. It does not hide the cursor, because a killed program could not show it again."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def show_cursor(self, show: bool = True) -> bool:
        return False


def live_panel(
    console: Console, latest: Callable[[], Status | None], redirects: bool = False, job: Callable[[], str] = str
) -> Live:
    """Returns a live view of the status from `latest`, below the text of `job` (which of several runs it is).

    Only `refresh` draws it, because rich's own refresh needs a second thread. With `redirects`, lines that the process
    writes to sys.stderr scroll above the view.
    """
    return Live(
        console=console,
        get_renderable=lambda: status_panel(status, job()) if (status := latest()) else Text(""),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=redirects,
    )


def status_panel(status: Status, job: str = "") -> RenderableType:
    """Returns the live view. Its most important lines come first, for terminals with few lines."""
    bar = Table.grid()  # a bar alone does not end its line
    if status.steps:
        bar.add_row(ProgressBar(total=status.steps, completed=status.step, width=60))
    waiting, width = status.waiting_reason(), 78
    reasons: dict[str, list[WorkerStatus]] = {}
    for worker in status.workers:
        if worker.waiting_for:
            reasons.setdefault(worker.waiting_for, []).append(worker)
    below = [  # long lines wrap and are not cut
        f"and {status.left_out:,} more workers" if status.left_out else "",
        regions_text(status.workers),
        *(f"{names_of(workers)} waits for: {why}" for why, workers in reasons.items()),
    ]
    return Group(
        Text(job, style="dim"),
        Text.assemble((status.mode, "bold"), "  ", "  ".join(status_metrics(status, width - len(status.mode)))),
        bar,
        Text(f"waiting: {waiting}" if waiting else "", style="yellow"),
        _workers(status),
        *(Text(text, style="dim") for text in below if text),
    )


def _workers(status: Status) -> Table:
    metrics = shown_of_workers(Display.TERMINAL)
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("worker", justify="right", no_wrap=True)
    table.add_column("state", min_width=9, no_wrap=True)
    for metric in metrics:
        table.add_column(metric.label, justify="right", no_wrap=True)
    for worker in status.workers:
        rank = Text(worker.label, style=RANK_COLOURS[worker.rank % len(RANK_COLOURS)])
        cells = {metric.name: metric.text(getattr(worker, metric.name)) for metric in metrics}
        if status.steps and "step" in cells:
            cells["step"] += f"/{status.steps:,}"
        since = f" {duration(worker.state_s)}" if worker.state_s >= _LONG_S else ""
        state = Text(f"{worker.state}{since}", style=_STATE_STYLES.get(worker.state, ""))
        table.add_row(rank, state, *cells.values())
    return table
