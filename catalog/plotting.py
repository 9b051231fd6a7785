"""One figure of a run: in the terminal, or as a file."""

from __future__ import annotations

import math
from pathlib import Path

from ..common.errors import UsageError
from ..common.reporting.metrics import Display, shown_of_run
from ..common.reporting.pictures import png, svg
from ..common.reporting.report import figure as written
from ..common.runstore.reading import RunStore, StoredRun
from .showing import plain, print_json, write

_COLUMNS, _ROWS = 72, 16
_OVER = {"step": "step", "time": "elapsed_s", "samples": "samples", "bytes": "num_bytes"}


def plot(path: Path, told: str, what: tuple[str, str], out: Path | None, *, as_json: bool) -> None:
    figure, over = what
    if over not in _OVER:
        raise UsageError(f"--over {over}: a run is drawn over {', '.join(_OVER)}", fix="--over step")
    with RunStore(path) as store:
        run = store.find(told)
        points = points_of(store, run, figure, over)
    if as_json:
        print_json({"run": run.id, "figure": figure, "over": over, "points": [list(point) for point in points]})
    elif out is None:
        print("\n".join(drawn(points, f"{plain(run.label)}: {figure} over {over}")))
    elif out.suffix == ".svg":
        picture = svg([(run.label, points)], over).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        write(f"{picture}\n".encode(), out)
    elif out.suffix == ".png":
        if not png(out, f"{run.label}: {figure}", [(run.label, points)], over):
            fix = "pip install 'paramserver[bench]', or --out FILE.svg, which needs nothing"
            raise UsageError("matplotlib is not installed, which draws PNG", fix=fix)
    else:
        raise UsageError(f"--out {out}: a picture is an .svg or a .png", fix=f"--out {out.stem}.svg")


def points_of(store: RunStore, run: StoredRun, figure: str, over: str) -> list[tuple[float, float]]:
    """(x, value) of a series, or of evaluations. UsageError names what there is."""
    metrics = [metric.name for metric in shown_of_run(Display.STATUS)]
    if figure in metrics:
        values = [(getattr(row, _OVER[over]), getattr(row, figure)) for row in store.series(run)]
        found = [(x, y) for x, y in values if x is not None and y is not None]
    else:
        evaluated = store.evaluations(run)
        known = list(dict.fromkeys(name for point in evaluated for name in point.figures))
        if figure not in known:
            raise UsageError(f"run {run.label} has no figure {figure}", fix=f"it has {', '.join([*metrics, *known])}")
        found = [(getattr(point, _OVER[over]), point.figures[figure]) for point in evaluated if figure in point.figures]
    found = [(float(x), float(y)) for x, y in found if x is not None and math.isfinite(y)]
    if len(found) < 2:
        message = f"run {run.label} has {len(found)} points of {figure} over {over}: nothing to draw"
        raise UsageError(
            message, fix="a run is looked at every server.status_interval_s, evaluated every run.eval_every"
        )
    return found


def drawn(points: list[tuple[float, float]], title: str) -> list[str]:
    """Lines of text; of several points in a column their mean."""
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
