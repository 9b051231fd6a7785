"""Curves as pictures: SVG without anything, PNG where matplotlib is installed (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from ...errors import OutputError

Curves = Sequence[tuple[str, Sequence[tuple[float, float]]]]

_WIDTH, _HEIGHT, _LEFT, _BELOW = 720, 320, 70, 30
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#17becf", "#7f7f7f")


def svg(curves: Curves, unit: str, line: float | None = None) -> str:
    """An SVG as it stands in HTML (a file wants xmlns); those of one name have one color.
    `line`: a value to be marked."""
    xs, ys = zip(*(point for _, points in curves for point in points), strict=True)
    last, low, high = max(xs) or 1.0, min(ys), max(ys)
    span = high - low or 1.0
    names = list(dict.fromkeys(name for name, _ in curves))

    def place(x: float, y: float) -> str:
        return f"{_LEFT + x / last * (_WIDTH - _LEFT):.1f},{10 + (high - y) / span * (_HEIGHT - 20):.1f}"

    box = f'viewBox="0 0 {_WIDTH + 160} {_HEIGHT + _BELOW}"'
    found = [f'<svg {box} width="{_WIDTH + 160}" height="{_HEIGHT + _BELOW}" font-size="12">']
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


def png(path: Path, title: str, curves: Curves, unit: str, line: float | None = None) -> bool:
    """The same into a file; False where there is no matplotlib. OutputError where it cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(name for name, _ in curves))
    for name, points in curves:
        index = names.index(name)
        label = _literal(name) if name not in [one.get_gid() for one in axes.lines] else None
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=_COLORS[index % len(_COLORS)], label=label, gid=name)
    if line is not None:
        axes.axhline(line, color="#999999", linestyle="--")
    axes.set(title=_literal(title), xlabel=unit)
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from None
    return True


def _literal(name: str) -> str:
    """What matplotlib would take for mathematics, or leave out of a legend."""
    return name.replace("$", r"\$").lstrip("_")
