"""Curves as pictures: SVG without dependencies, PNG if matplotlib is installed (the extra `bench`).

Curves with the same name are runs that differ only in their seed. They share a color, and a band shows their range.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import cycle
from pathlib import Path

from ...errors import OutputError, plain
from .words import size

Points = Sequence[tuple[float, float]]
Curves = Sequence[tuple[str, Points]]

_WIDTH, _HEIGHT, _LEFT, _BELOW = 720, 320, 70, 30
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#17becf", "#7f7f7f")


def _colors(curves: Curves) -> dict[str, str]:
    """Returns the color of each name."""
    return dict(zip(dict.fromkeys(name for name, _ in curves), cycle(_COLORS), strict=False))


def svg(curves: Curves, unit: str) -> str:
    """Returns an SVG element for HTML (a file also needs xmlns)."""
    xs, ys = zip(*(point for _, points in curves for point in points), strict=True)
    last, low, high = max(xs) or 1.0, min(ys), max(ys)
    span = high - low or 1.0
    colors = _colors(curves)

    def at(*points: tuple[float, float]) -> str:
        x_scale, y_scale = (_WIDTH - _LEFT) / last, (_HEIGHT - 20) / span
        return " ".join(f"{_LEFT + x * x_scale:.1f},{10 + (high - y) * y_scale:.1f}" for x, y in points)

    box = f'viewBox="0 0 {_WIDTH + 160} {_HEIGHT + _BELOW}"'
    found = [f'<svg {box} width="{_WIDTH + 160}" height="{_HEIGHT + _BELOW}" font-size="12">']
    unit = escape(plain(unit))
    for name, color in colors.items():
        spanned = band([points for label, points in curves if label == name])
        edge = [(x, low) for x, low, _ in spanned] + [(x, high) for x, _, high in reversed(spanned)]
        if edge:
            found.append(f'<polygon fill="{color}" fill-opacity="0.15" points="{at(*edge)}"/>')
    for name, points in curves:
        found.append(f'<polyline fill="none" stroke="{colors[name]}" stroke-width="2" points="{at(*points)}"/>')
    for index, (name, color) in enumerate(colors.items()):
        found.append(f'<text x="{_WIDTH + 10}" y="{20 + 16 * index}" fill="{color}">{escape(plain(name))}</text>')
    for text, x, y in (
        (f"{high:.3g}", 5, 16),
        (f"{low:.3g}", 5, _HEIGHT - 6),
        (f"0 {unit}", _LEFT, _HEIGHT + 18),
        (size(last) if unit == "bytes" else f"{last:,.4g} {unit}", _WIDTH - 40, _HEIGHT + 18),
    ):
        found.append(f'<text x="{x}" y="{y}">{text}</text>')
    return "".join(found) + "</svg>"


def band(curves: Sequence[Points]) -> list[tuple[float, float, float]]:
    """Returns (x, lowest, highest) where all curves have a value, with linear interpolation; x ascends."""
    if len(curves) < 2:
        return []
    import numpy as np  # loaded only here: most programs draw no band

    first, last = max(points[0][0] for points in curves), min(points[-1][0] for points in curves)
    xs = sorted({x for points in curves for x, _ in points if first <= x <= last})
    at = [np.interp(xs, *np.array(points, float).T).tolist() for points in curves]
    return [(x, min(ys), max(ys)) for x, *ys in zip(xs, *at, strict=True)]


def png(path: Path, title: str, curves: Curves, unit: str, line: float | None = None) -> bool:
    """Write the picture as PNG. `line`: a value to mark.

    Returns False without matplotlib. Raises OutputError if the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for name, color in _colors(curves).items():
        same = [points for label, points in curves if label == name]
        for at, points in enumerate(same):
            axes.plot(*zip(*points, strict=True), color=color, label=None if at else _literal(name))
        if spanned := band(same):
            axes.fill_between(*zip(*spanned, strict=True), color=color, alpha=0.15, linewidth=0)
    if line is not None:
        axes.axhline(line, color="#999999", linestyle="--")
    axes.set(title=_literal(title), xlabel=unit)
    if unit == "bytes":
        axes.xaxis.set_major_formatter(lambda count, _: size(count))
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from None
    return True


def _literal(name: str) -> str:
    """Escapes `$`, which matplotlib reads as mathematics, and a first `_`, which hides a name from the legend."""
    text = plain(name).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
