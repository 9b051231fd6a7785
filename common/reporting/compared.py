"""Runs side by side as files for people: one HTML without references to anything outside, and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from ..errors import OutputError
from .findings import findings, points_of, target_of
from .output import check_writable, write_whole
from .report import comparison_cells
from .summary import Summary

_WIDTH, _HEIGHT, _LEFT, _BELOW = 720, 320, 70, 30
_FILES = ("report.html", "report.md")
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#17becf", "#7f7f7f")
_STYLE = (
    "body{font:15px sans-serif;margin:2em}td,th{padding:2px 12px;text-align:right}td:first-child{text-align:left}"
    "svg{background:#fafafa}"
)


def write_report(directory: str, title: str, runs: Sequence[tuple[str, Summary]], notes: Sequence[str] = ()) -> None:
    """`report.html` and `report.md` in a directory, which is made: what the runs say in sentences, a table of all, and
    of those that were evaluated on their way the curves over seconds and over steps. Runs of one name are the same with
    several seeds. OutputError where it cannot be written."""
    head, rows = comparison_cells(runs)
    said, target = findings(runs), target_of(runs)
    names = list(dict.fromkeys(name for _, run in runs for point in run.curve for name in point.figures))
    shown = [name for name in ("loss", "accuracy") if name in names] or names[:1]
    cells = "".join(
        "<tr>" + "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in row) + "</tr>"
        for kind, row in [("th", head), *(("td", row) for row in rows)]
    )
    parts = [
        f"<ul>{''.join(f'<li>{escape(one)}</li>' for one in said)}</ul>" if said else "",
        f"<table>{cells}</table>",
    ]
    lines = [
        f"# {title}",
        "",
        *(f"- {one}" for one in said),
        "",
        _row(head),
        _row(["---"] * len(head)),
        *map(_row, rows),
    ]
    for name in shown:
        curves = [(label, points) for label, run in runs if len(points := points_of(run, name)) > 1]
        if not curves:
            continue
        over_s = [(label, [(at, value) for at, _, value in points]) for label, points in curves]
        over_steps = [(label, [(float(step), value) for _, step, value in points]) for label, points in curves]
        line = target.value if target is not None and target.figure == name else None
        parts += [f"<h2>{escape(name)} over seconds</h2>", _plot(over_s, "s", line)]
        parts += [f"<h2>{escape(name)} over steps</h2>", _plot(over_steps, "steps", line)]
        for label, points in curves:
            lines += ["", f"## {label}: {name}", "", f"| s | step | {name} |", "| --- | --- | --- |"]
            lines += [f"| {at:,.1f} | {step:,} | {value:.4f} |" for at, step, value in points]
    parts += [f"<p>{escape(note)}</p>" for note in notes]
    html = (
        f'<!doctype html><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1>{''.join(parts)}\n"
    )
    lines += ["", *notes]
    _write(directory, html, "\n".join(lines) + "\n")


def prepare_report(directory: str) -> None:
    """The directory, in which nothing is changed yet. OutputError where a report cannot be written: now, and not after
    hours of training."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        told = f"the report cannot be written to {directory}: {error.strerror}"
        raise OutputError(told, fix="name a directory that you may write to (--report DIR)") from None
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


def _plot(curves: Sequence[tuple[str, list[tuple[float, float]]]], unit: str, line: float | None) -> str:
    """An SVG; those of one name have one color. `line`: a value to be marked."""
    xs, ys = zip(*(point for _, points in curves for point in points), strict=True)
    last, low, high = max(xs) or 1.0, min(ys), max(ys)
    span = high - low or 1.0
    names = list(dict.fromkeys(name for name, _ in curves))

    def place(x: float, y: float) -> str:
        return f"{_LEFT + x / last * (_WIDTH - _LEFT):.1f},{10 + (high - y) / span * (_HEIGHT - 20):.1f}"

    found = [f'<svg width="{_WIDTH + 160}" height="{_HEIGHT + _BELOW}" font-size="12">']
    for name, points in curves:
        color = _COLORS[names.index(name) % len(_COLORS)]
        places = " ".join(place(x, y) for x, y in points)
        found.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{places}"/>')
    if line is not None:
        ends = f"{place(0, line)} {place(last, line)}"
        found.append(f'<polyline fill="none" stroke="#999" stroke-dasharray="4" points="{ends}"/>')
    for index, name in enumerate(names):
        color = _COLORS[index % len(_COLORS)]
        found.append(f'<text x="{_WIDTH + 10}" y="{20 + 16 * index}" fill="{color}">{escape(name)}</text>')
    for text, x, y in (
        (f"{high:.3g}", 5, 16),
        (f"{low:.3g}", 5, _HEIGHT - 6),
        (f"0 {unit}", _LEFT, _HEIGHT + 18),
        (f"{last:,.4g} {unit}", _WIDTH - 40, _HEIGHT + 18),
    ):
        found.append(f'<text x="{x}" y="{y}">{text}</text>')
    return "".join(found) + "</svg>"
