"""Plots one metric of a run, in the terminal or as a file."""

from __future__ import annotations

import math
from pathlib import Path

from ..common.errors import UsageError, plain
from ..common.reporting.metrics import Display, shown_of_run
from ..common.reporting.pictures import png, svg
from ..common.reporting.report import short_number as written
from ..common.runstore.reading import RunStore, StoredRun
from .showing import print_json, write

_COLUMNS, _ROWS = 72, 16
_OVER = {"step": "step", "time": "elapsed_s", "samples": "samples", "bytes": "num_bytes"}


def plot(path: Path, name: str, axes: tuple[str, str], out: Path | None, *, as_json: bool) -> None:
    """Plot a metric over an x axis (`axes`) as text, JSON, SVG or PNG. Raises UsageError."""
    metric, over = axes
    if over not in _OVER:
        raise UsageError(f"--over {over} is not one of {', '.join(_OVER)}", fix="--over step")
    with RunStore(path) as store:
        run = store.find(name)
        points = _points(store, run, metric, over)
    if as_json:
        print_json({"run": run.id, "metric": metric, "over": over, "points": [list(point) for point in points]})
    elif out is None:
        print("\n".join(_text_plot(points, plain(f"{run.label}: {metric} over {over}"))))
    elif out.suffix == ".svg":
        picture = svg([(run.label, points)], over).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        write(f"{picture}\n".encode(), out)
    elif out.suffix != ".png":
        raise UsageError(f"--out {out}: a picture is an .svg or a .png", fix=f"--out {out.stem}.svg")
    elif not png(out, f"{run.label}: {metric}", [(run.label, points)], over):
        fix = "pip install 'paramserver[bench]', or --out FILE.svg, which needs nothing"
        raise UsageError("PNG needs matplotlib, which is not installed", fix=fix)


def _points(store: RunStore, run: StoredRun, metric: str, over: str) -> list[tuple[float, float]]:
    """Returns (x, value) of a series or of evaluations. Raises UsageError that names the known metrics."""
    metrics = [metric.name for metric in shown_of_run(Display.STATUS)]
    if metric in metrics:
        found = [(getattr(row, _OVER[over]), getattr(row, metric)) for row in store.series(run)]
    else:
        evaluated = store.evaluations(run)
        known = list(dict.fromkeys(name for point in evaluated for name in point.metrics))
        if metric not in known:
            raise UsageError(f"run {run.label} has no metric {metric}", fix=f"it has {', '.join([*metrics, *known])}")
        found = [(getattr(point, _OVER[over]), point.metrics.get(metric)) for point in evaluated]
    points = [(float(x), float(y)) for x, y in found if x is not None and y is not None and math.isfinite(y)]
    if len(points) < 2:
        message = f"run {run.label} has {len(points)} points of {metric} over {over}, and a plot needs two"
        raise UsageError(message, fix="lower server.status_interval_s for series, run.eval_every for evaluations")
    return points


def _text_plot(points: list[tuple[float, float]], title: str) -> list[str]:
    """Returns lines of text; several points in one column are drawn as their mean."""
    first, last = points[0][0], points[-1][0]
    columns: dict[int, list[float]] = {}
    for x, y in points:
        columns.setdefault(round((x - first) / ((last - first) or 1) * (_COLUMNS - 1)), []).append(y)
    means = {column: sum(ys) / len(ys) for column, ys in columns.items()}
    low, high = min(means.values()), max(means.values())
    grid = [[" "] * _COLUMNS for _ in range(_ROWS)]
    for column, y in means.items():
        grid[round((high - y) / ((high - low) or 1) * (_ROWS - 1))][column] = "•"
    names = [written(high), *[""] * (_ROWS - 2), written(low)]
    width = max(map(len, names))
    lines = [f"{name:>{width}} │{''.join(row).rstrip()}" for name, row in zip(names, grid, strict=True)]
    end = f"{last:,.4g}"
    return [title, *lines, f"{'':{width}} └{'─' * _COLUMNS}", f"{'':{width}}  {first:<,.4g}{end:>{_COLUMNS - 6}}"]
