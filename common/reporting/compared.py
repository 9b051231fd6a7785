"""Runs side by side as files for people: one HTML without references to anything outside, and Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from ..config.conditions import Condition
from ..errors import OutputError
from .curve import TRAINED, Point
from .findings import findings, spreads, target_of
from .output import check_writable, write_whole
from .pictures import Curves, bar_svg, png, svg
from .report import comparison_cells, run_measures
from .summary import Summary

Table = tuple[list[str], list[list[str]]]  # names of the columns, rows
Picture = tuple[str, str, str, Curves]  # its PNG's name, what it shows, over what, the curves
_FILES = ("report.html", "report.md")
_NO_PNG = "The curves are in report.html only: matplotlib, which draws PNG, is not installed (paramserver[bench])."
_TRAINED = "Not all were evaluated on their way (run.eval_every): train_loss is drawn, which workers told in training."
_MOST_ROWS = 50  # of a curve in Markdown
_UNITS: dict[str, Callable[[Point], float | None]] = {
    "s": lambda point: point.elapsed_s,
    "steps": lambda point: float(point.step),
    "bytes": lambda point: point.num_bytes,
}
_STYLE = (
    "body{font:15px sans-serif;margin:2em}td,th{padding:2px 12px;text-align:right}td:first-child{text-align:left}"
    "svg{background:#fafafa}"
)


def write_report(
    directory: str,
    title: str,
    runs: Sequence[tuple[str, Summary]],
    notes: Sequence[str] = (),
    differences: Mapping[str, Sequence[object]] | None = None,
    extra: tuple[Sequence[Table], Sequence[Picture]] = ((), ()),
    target: Condition | None = None,
) -> None:
    """`report.html` and `report.md` in a directory, which is made: what the runs say in sentences, a table of all, what
    `differences` their settings have (by key, a value for each run), curves over seconds, steps and bytes (of
    evaluations; of the training loss where a run has none), where matplotlib is installed as PNG too, and bars. Runs
    of one name are the same with several seeds. `more` tables, and pictures (without a mark), stand behind these.
    Without a `target` it is what every run has reached. OutputError where it cannot be written."""
    tables = [comparison_cells(runs, target or target_of(runs)), *extra[0]]
    if differences:
        head = ["setting", *(label for label, _ in runs)]
        tables.append((head, [[key, *map(str, values)] for key, values in differences.items()]))
    # Metrics of different tasks, which a note is about, are not ranked.
    sentences = findings(runs, target) if not any("different tasks" in note for note in notes) else []
    parts = [
        f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in sentences)}</ul>" if sentences else "",
        *map(_table, tables),
    ]
    lines = [f"# {title}", "", *(f"- {text}" for text in sentences)]
    for head, rows in tables:
        lines += ["", _row(head), _row(["---"] * len(head)), *map(_row, rows)]
    pictures = _pictures(runs, target or target_of(runs))
    prepare_report(directory)
    remarks = [*notes, *([_TRAINED] if TRAINED in _shown(runs) else [])]
    for file, name, unit, curves, line in [*pictures, *((*picture, None) for picture in extra[1])]:
        parts += [f"<h2>{escape(name)} over {unit}</h2>", svg(curves, unit, line)]
        if not png(Path(directory) / file, f"{name} over {unit}", curves, unit, line):
            remarks += [_NO_PNG] if _NO_PNG not in remarks else []
        else:
            lines += ["", f"![{name} over {unit}]({file})"]
    for measure in run_measures(runs):
        by_name = spreads(runs, measure.get)
        if any(spread.high for spread in by_name.values()):
            bars = [(label, *spread, spread.text(measure.write)) for label, spread in by_name.items()]
            parts += [f"<h2>{escape(measure.name)}</h2>", bar_svg(bars)]
    for label, run, name in _drawn(runs):
        lines += ["", f"## {label}: {name}", "", f"| s | step | {name} | bytes |", "| --- | --- | --- | --- |"]
        points = run.points_of(name)
        lines += [
            f"| {point.elapsed_s:,.1f} | {point.step:,} | {point.metrics[name]:.4f} | {_bytes(point)} |"
            for point in points[:: -(-len(points) // _MOST_ROWS)]
        ]  # fmt: skip
    parts += [f"<p>{escape(note)}</p>" for note in remarks]
    html = (
        f'<!doctype html><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1>{''.join(parts)}\n"
    )
    lines += ["", *remarks]
    _write(directory, html, "\n".join(lines) + "\n")


def _shown(runs: Sequence[tuple[str, Summary]]) -> list[str]:
    """The metrics that are drawn: of evaluations, and of training where a run was not evaluated on its way."""
    names = list(dict.fromkeys(name for _, run in runs for point in run.curve for name in point.metrics))
    shown: list[str] = [name for name in ("loss", "accuracy") if name in names] or names[:1]
    is_bare = any(max((len(run.points_of(name)) for name in shown), default=0) < 2 for _, run in runs)
    return [*shown, TRAINED] if is_bare and any(len(run.points_of(TRAINED)) > 1 for _, run in runs) else shown


def _drawn(runs: Sequence[tuple[str, Summary]]) -> list[tuple[str, Summary, str]]:
    """What has a curve, by metric."""
    return [(label, run, name) for name in _shown(runs) for label, run in runs if len(run.points_of(name)) > 1]


def _pictures(
    runs: Sequence[tuple[str, Summary]], target: Condition | None
) -> list[tuple[str, str, str, Curves, float | None]]:
    """File, metric, what it is over, the curves, and a value to be marked."""
    found: list[tuple[str, str, str, Curves, float | None]] = []
    for name in _shown(runs):
        line = target.bound if target is not None and target.metric == name else None
        for unit, get in _UNITS.items():
            curves = []
            for label, run, metric in _drawn(runs):
                points = [(get(point), point.metrics[name]) for point in run.points_of(name)]
                known = [(x, y) for x, y in points if x is not None and math.isfinite(y)]
                if metric == name and len(known) > 1:
                    curves.append((label, known))
            if curves:
                found.append((f"{_file_of(name)}-over-{unit}.png", name, unit, curves, line))
    return found


def _file_of(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def _bytes(point: Point) -> str:
    return "" if point.num_bytes is None else f"{point.num_bytes:,}"


def _table(table: Table) -> str:
    head, rows = table
    cells = "".join(
        "<tr>" + "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in row) + "</tr>"
        for kind, row in [("th", head), *(("td", row) for row in rows)]
    )
    return f"<table>{cells}</table>"


def prepare_report(directory: str) -> None:
    """The directory, in which nothing is changed yet. OutputError where a report cannot be written: now, and not after
    hours of training."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"the report cannot be written to {directory}: {error.strerror}"
        raise OutputError(message, fix="name a directory that you may write to (--report DIR)") from None
    for name in _FILES:
        check_writable(str(Path(directory) / name))


def _write(directory: str, *texts: str) -> None:
    prepare_report(directory)
    for name, text in zip(_FILES, texts, strict=True):
        try:
            write_whole(Path(directory) / name, text.encode(), is_synced=False)
        except OSError as error:
            raise OutputError(f"{directory}/{name} cannot be written: {error.strerror}") from None


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
