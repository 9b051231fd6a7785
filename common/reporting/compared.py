"""Runs side by side as files for people: one HTML without references to anything outside, and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from ..errors import UsageError
from .report import comparison_cells
from .summary import Summary

_WIDTH, _HEIGHT, _LEFT, _BELOW = 720, 320, 70, 30
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#17becf", "#7f7f7f")
_STYLE = (
    "body{font:15px sans-serif;margin:2em}td,th{padding:2px 12px;text-align:right}td:first-child{text-align:left}"
    "svg{background:#fafafa}"
)


def write_report(directory: str, title: str, runs: Sequence[tuple[str, Summary]], notes: Sequence[str] = ()) -> None:
    """`report.html` and `report.md` in a directory, which is made: a table of all runs, and the loss over seconds of
    those that were evaluated. UsageError where it cannot be written."""
    head, rows = comparison_cells(runs)
    curves = {name: [(p.elapsed_s, p.figures["loss"]) for p in run.curve if "loss" in p.figures] for name, run in runs}
    curves = {name: points for name, points in curves.items() if len(points) > 1}
    plot = f"<h2>Loss over seconds</h2>{_plot(curves)}" if curves else ""
    cells = "".join(
        "<tr>" + "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in row) + "</tr>"
        for kind, row in [("th", head), *(("td", row) for row in rows)]
    )
    told = "".join(f"<p>{escape(note)}</p>" for note in notes)
    html = (
        f'<!doctype html><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1><table>{cells}</table>{plot}{told}\n"
    )
    lines = [f"# {title}", "", _row(head), _row(["---"] * len(head)), *map(_row, rows)]
    for name, points in curves.items():
        lines += ["", f"## {name}: loss over seconds", "", "| s | loss |", "| --- | --- |"]
        lines += [f"| {at:,.1f} | {loss:.4f} |" for at, loss in points]
    lines += ["", *notes]
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / "report.html").write_text(html)
        (Path(directory) / "report.md").write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise UsageError(f"the report cannot be written to {directory}: {error.strerror}", fix="another one") from None


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _plot(curves: dict[str, list[tuple[float, float]]]) -> str:
    """An SVG."""
    xs, ys = zip(*(point for points in curves.values() for point in points), strict=True)
    last, low, high = max(xs) or 1.0, min(ys), max(ys)
    span = high - low or 1.0
    found = [f'<svg width="{_WIDTH + 160}" height="{_HEIGHT + _BELOW}" font-size="12">']
    for index, (name, points) in enumerate(curves.items()):
        color = _COLORS[index % len(_COLORS)]
        places = " ".join(
            f"{_LEFT + x / last * (_WIDTH - _LEFT):.1f},{10 + (high - y) / span * (_HEIGHT - 20):.1f}"
            for x, y in points
        )
        found.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{places}"/>')
        found.append(f'<text x="{_WIDTH + 10}" y="{20 + 16 * index}" fill="{color}">{escape(name)}</text>')
    for text, x, y in (
        (f"{high:.3g}", 5, 16),
        (f"{low:.3g}", 5, _HEIGHT - 6),
        ("0 s", _LEFT, _HEIGHT + 18),
        (f"{last:,.4g} s", _WIDTH - 40, _HEIGHT + 18),
    ):
        found.append(f'<text x="{x}" y="{y}">{text}</text>')
    return "".join(found) + "</svg>"
