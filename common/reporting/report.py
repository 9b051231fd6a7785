"""Text reports of runs: a status line, the results of one run, a table of several runs side by side, and a live panel.

Tables omit columns of rare metrics that are zero for every worker (dropped, rejected, restarts), so that they fit 100
columns. Output to a file or a pipe is never cut.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from ..config.conditions import Condition
from ..errors import plain
from .comparison import comparison_cells
from .metrics import OF_WORKER, Display, Metric, shown_of_workers
from .pictures.words import duration, share, short_number, size
from .summary import Status, Summary, WorkerStatus, names_of

_FILE_WIDTH = 160  # without a terminal: wide enough that no table is cut; tables take only what they need

_MOST_GAIN = 4.0  # of an outer momentum; beyond it rounds overshoot


_WIDTH = 100  # at most, of a comparison
# Columns of a comparison and of the workers of a run, in the order in which they go where there is no room for them.
_FIRST_TO_GO = ("traffic", "version", "stale max", "waiting", "stale mean", "for waiting", "peer traffic", "steps/s",
                "traffic/worker", "samples/s")  # fmt: skip
_FIRST_OF_WORKERS = ("lead max", "residuals lost", "lost norm", "residual norm", "stale max", "peer traffic",
                     "contributions", "transfer s", "received", "compute s", "stale mean", "sent", "wait s",
                     "clipped")  # fmt: skip


class FittingTable:
    """A table that leaves out columns, in the order of `first_to_go`, until it fits: a cut word says nothing.

    `columns`: the first is that of names. A space in another heading may be a line break where `is_narrow`.
    """

    def __init__(self, columns: Sequence[str], first_to_go: Sequence[str], *, most: int = _FILE_WIDTH,
                 is_narrow: bool = False, first: Column | None = None) -> None:  # fmt: skip
        self._columns, self._first_to_go, self._most = list(columns), first_to_go, most
        self._is_narrow, self._first = is_narrow, first or Column(columns[0], justify="right", overflow="fold")
        self._rows: list[tuple[str | Text, ...]] = []

    def add_row(self, *cells: str | Text) -> None:
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = [name.replace(" ", "\n") if self._is_narrow and at else name for at, name in enumerate(self._columns)]
        columns = list(zip(head, *self._rows, strict=True))
        widths = [2 + max(cell_len(line) for cell in column for line in str(cell).split("\n")) for column in columns]
        kept = list(range(len(head)))
        for name in self._first_to_go:
            if sum(widths[at] for at in kept) - 2 <= min(self._most, options.max_width):
                break
            kept = [at for at in kept if self._columns[at] != name or not at]
        metrics = (Column(head[at], justify="right", overflow="fold", vertical="bottom") for at in kept[1:])
        table = Table(self._first, *metrics, box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
        for row in self._rows:
            table.add_row(*(row[at] for at in kept))
        yield table


class PipeConsole(Console):
    """Prints strings as they are: no markup, no emoji codes, and control characters are escaped.

    Raises BrokenPipeError for a broken pipe, where rich would end the process.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(_lines(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            is_plain = segment.control or segment.text == "\n" or segment.text.isprintable()
            yield segment if is_plain else segment._replace(text=_lines(segment.text))


def _lines(text: str) -> str:
    return text if text.isprintable() else "\n".join(map(plain, text.split("\n")))


def print_results(*results: RenderableType, style: str = "") -> None:
    """Print results that are safe already. An output that cannot have them fails no run; a broken pipe does."""
    console = report_console()
    try:
        for result in results:
            console.print(result, style=style)
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:  # ValueError: also characters that the output's encoding lacks
        print(f"the results cannot be printed: {plain(str(error))}", file=sys.stderr)


def report_console(file: IO[str] | None = None) -> Console:
    """Returns a console on standard output or `file`. A file or pipe is wide, or as wide as COLUMNS says."""
    file = file or sys.stdout
    return PipeConsole(file=file, width=None if file.isatty() or "COLUMNS" in os.environ else _FILE_WIDTH)


def summary_table(summary: Summary) -> RenderableType:
    """Returns the results of one run: a headline with its main metrics, and a row per worker."""
    metrics = [metric for metric in shown_of_workers(Display.SUMMARY) if _is_worth_it(metric, summary.workers)]
    names = ["worker", *(metric.label for metric in metrics)]
    first = Column("worker", justify="right", vertical="bottom")
    table = FittingTable(names, _FIRST_OF_WORKERS, is_narrow=True, first=first)
    for worker in sorted(summary.workers, key=lambda worker: worker.rank):
        table.add_row(worker.label, *(metric.text(getattr(worker, metric.name)) for metric in metrics))
    samples_per_s = OF_WORKER["samples_per_s"].text(summary.samples_per_s if summary.wall_s else None)
    headline = Text.assemble(
        (summary.label, "bold"),
        f"   {summary.version:,} updates in {duration(summary.wall_s)}",
        f"   {samples_per_s} samples/s   waiting {share(summary.wait_share)}",
        f"   {_transports(summary)}" if summary.workers else "",
    )
    sizes = ", ".join(size(shard.lasting_bytes) for shard in summary.shards)
    lines = [
        (f"{len(summary.shards)} shards, which hold {sizes}" if sizes else "", "dim"),
        (regions_text(summary.workers), "dim"),
        (f"cost {summary.cost}" if summary.cost is not None else "", "dim"),
        (summary.ended_by, "yellow"),
        _direction(summary.cosine, summary.gain),
        ("   ".join(f"{name} {short_number(value)}" for name, value in summary.final.items()), "bold green"),
    ]
    if (best := summary.best) is not None and len(summary.curve) > 1:
        found = "   ".join(f"{name} {short_number(value)}" for name, value in best.metrics.items())
        lines.append((f"best at step {best.step:,} of {len(summary.curve)} evaluations: {found}", ""))
    parts = [headline, *(Text(text, style=style) for text, style in lines if text)]
    return Group(*parts, *([table] if summary.workers else []))


def regions_text(workers: Iterable[WorkerStatus]) -> str:
    """`2 regions: 0 eu (3 workers), 1 us (2 workers); 5.2 MB over borders, 60 MB within`; empty without regions."""
    relays = [worker for worker in workers if worker.region]
    if not relays:
        return ""
    num_workers = [OF_WORKER["region_workers"].text(relay.region_workers) for relay in relays]
    names = [f"{relay.label} ({num} workers)" for relay, num in zip(relays, num_workers, strict=True)]
    border, within = sum(relay.num_bytes for relay in relays), sum(relay.region_bytes or 0 for relay in relays)
    return f"{len(relays)} regions: {', '.join(names)}; {size(border)} over borders, {size(within)} within"


def _is_worth_it(metric: Metric, workers: list[WorkerStatus]) -> bool:
    """Returns whether the metric's column adds information to the table."""
    if metric.differs_from:
        return any(getattr(worker, metric.name) != getattr(worker, metric.differs_from) for worker in workers)
    return not metric.is_rare or any(getattr(worker, metric.name) for worker in workers)


def comparison_table(runs: list[tuple[str, Summary]], target: Condition | None = None) -> FittingTable:
    """Returns one row per run: final metrics, the time to the target, then costs."""
    head, rows = comparison_cells(runs, target)
    table = FittingTable(head, _FIRST_TO_GO, most=_WIDTH, first=Column(head[0], style="bold", overflow="fold"))
    for row in rows:
        table.add_row(*row)
    return table


_LINE = 80  # columns of a status


def status_line(status: Status, job: str = "") -> str:
    """`step 118/500  version 472  training loss 0.310  3,250 samples/s  12 s to go`, at most 80 columns.

    The reason for waiting is on the same line if it fits, and otherwise on the next. `job`: which run it is.
    """
    line = "  ".join(status_metrics(status, _LINE, job))
    if not (waiting := status.waiting_reason()):
        return line
    apart = "  " if len(line) + len(waiting) + len("  waiting: ") <= _LINE else "\n  "
    return f"{line}{apart}waiting: {waiting}"


def status_metrics(status: Status, width: int, job: str = "") -> list[str]:
    """Returns the parts of `status_line` that fit the width and are known."""
    total = f"/{status.steps:,}" if status.steps else ""
    parts = {"job": job, "step": f"step {status.step:,}{total}", "version": f"version {status.version:,}"}
    if status.loss is not None:
        parts["loss"] = f"training loss {short_number(status.loss)}"
    if (point := status.evaluated) is not None:
        found = {name: f"held-out {name} {short_number(value)}" for name, value in point.metrics.items()}
        parts["held out"] = found.pop("loss", "")
        parts["also"] = next(iter(found.values()), "")
    if status.samples_per_s:
        parts["rate"] = f"{status.samples_per_s:,.0f} samples/s"
    if status.eta_s is not None and not job:
        parts["to go"] = f"{duration(status.eta_s)} to go"
    for name in ("version", "also", "rate", "to go", "held out", "loss"):  # in this order until the rest fits
        if sum(len(part) + 2 for part in parts.values() if part) - 2 > width:
            parts.pop(name, None)
    return [part for part in parts.values() if part]


def _direction(cosine: float | None, gain: float | None) -> tuple[str, str]:
    """Returns how similar the directions of successive rounds are, with the gain of outer momentum, and its style."""
    if cosine is None or gain is None:
        return "", ""
    message = f"deltas of successive rounds: cosine {cosine:.2f}, which outer momentum makes {gain:.1f} times as far"
    if gain <= _MOST_GAIN:
        return message, "dim"
    return f"{message}: beyond {_MOST_GAIN:g}, try a lower --outer-momentum or --outer-lr", "yellow"


def _transports(summary: Summary) -> str:
    """Returns `transport direct, int8`, or the transports by rank; for grpc with the reason."""
    ranks: dict[tuple[str, str], list[str]] = {}
    for worker in summary.workers:
        why = worker.transport_reason if worker.transport == "grpc" else ""
        how = worker.transport if worker.codec == "raw" else f"{worker.transport}, {worker.codec}"
        ranks.setdefault((how, why), []).append(str(worker.rank))
    shown = []
    for (transport, why), ranks_of in ranks.items():
        whose = f": rank {', '.join(ranks_of)}" if len(ranks) > 1 else ""
        shown.append(f"{transport}{whose}{f' ({why})' if why else ''}")
    return f"transport {'; '.join(shown)}"


# ---- panel ---------------------------------------------------------------------------------------
# A run as a table that stays at the bottom of a terminal while lines scroll above it.


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
