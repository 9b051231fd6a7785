"""Results as a picture: what each contestant carries, by size; a race's held-out loss, over time and over bytes."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from ...common.errors import OutputError, UsageError
from ...common.reporting.output import check_writable

if TYPE_CHECKING:
    from .report import Report

# As on the dashboard (web/static/style.css).
_MODE_COLOURS = {
    "sync": "#2563eb", "ssp": "#0d8f83", "localsgd": "#9333ea", "diloco": "#db2777", "async_diloco": "#9a4b1e",
    "allreduce": "#0787ab",
}  # fmt: skip
_MARKS = ["o", "s", "^", "D", "v", "x"]
_SIZE_INCHES, _RACE_INCHES, _DPI = (9, 5.5), (12, 5), 120


def check_plot(path: str | None, sweep: bool, suffixes: tuple[str, ...] = (".png",)) -> None:
    """Raise UsageError or OutputError now for what could not be drawn at the end."""
    if path is None:
        return
    if not sweep:
        raise UsageError("--plot draws a sweep", fix="add --sweep")
    if not can_plot():
        raise UsageError("--plot needs matplotlib, which is not installed", fix="pip install matplotlib")
    if not path.endswith(suffixes):
        kinds = " or ".join(suffix[1:].upper() for suffix in suffixes)
        raise UsageError(f"--plot {path}: the picture is a {kinds}", fix=f"--plot {path}{suffixes[0]}")
    check_writable(path)


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(report: Report, path: str) -> None:
    """OutputError when `path` cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = _race(report) if report.measurement == "race" else _sweep(report)
    try:
        figure.savefig(path, dpi=_DPI, bbox_inches="tight")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}", fix="choose a path you may write to") from None
    finally:
        pyplot.close(figure)


def _sweep(report: Report) -> Any:
    """Megabytes there and back through the time of an exchange, or what a link of a ring carries in an all-reduce."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=_SIZE_INCHES)
    for name, is_ours, points in curves(report.results["sizes"]):
        sizes, rates = zip(*points, strict=True)
        axes.plot(sizes, rates, "o-" if is_ours else ".--", label=name, linewidth=2 if is_ours else 1)
    title, rate = "One exchange", "GB/s, up and down together"
    if "of" in report.results["sizes"][0]:
        title, rate = "One all-reduce", "bus bandwidth, GB/s"
    axes.set(xscale="log", yscale="log", xlabel="size of the model, MB", ylabel=rate)
    axes.set_title(f"{title} by size; {report.title}", fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    return figure


def _race(report: Report) -> Any:
    """A line for each side, the mean of its seeds. Ours have their mode's colour, its second side dashes; baselines are
    grey, with marks."""
    from matplotlib import pyplot

    sides, config = report.results["sides"], report.config
    figure, (by_time, by_bytes) = pyplot.subplots(1, 2, figsize=_RACE_INCHES, sharey=True)
    figure.set_facecolor("white")  # also on a dark page
    baselines = [name for name in config["sides"] if name not in config["modes"]]
    styles = {name: _mode_style(name) for name in config["modes"]}
    styles |= {name: {"color": "#6b7280", "marker": mark} for name, mark in zip(baselines, _MARKS * 2, strict=False)}
    for name, side in sides.items():
        seconds, link_mb, losses = zip(*side["curve"], strict=True)
        for axes, values in ((by_time, seconds), (by_bytes, link_mb)):
            axes.plot(values, losses, label=f"{name}: {side['loss']:.2f}", linewidth=1.8, markersize=4, **styles[name])
    by_time.set(xlabel="time, s", ylabel="held-out loss, nats a byte")
    by_bytes.set(xlabel="a worker's link, up and down, MB", xscale="log", xlim=(0.1, None))
    for axes in (by_time, by_bytes):
        axes.grid(True, which="major", alpha=0.3)
        if target := report.results.get("target_loss"):
            axes.axhline(target, color="grey", linewidth=1, linestyle=":", label="the target")
    by_bytes.legend(loc="center left", bbox_to_anchor=(1, 0.5), title="final loss, best first")
    link = f"{config['workers']} workers, each on a link of {config['bandwidth_mbit']:g} Mbit/s"
    figure.suptitle(f"{link}, {config['latency_ms']:g} ms; {report.title}", fontsize=10)
    return figure


def _mode_style(name: str) -> dict[str, Any]:
    mode, _, codec = name.partition("-")
    return {"color": _MODE_COLOURS.get(mode, "#4f46a5"), "linestyle": (0, (5, 2)) if codec else "-"}


def curves(sizes: list[dict[str, Any]]) -> list[tuple[str, bool, list[tuple[float, float]]]]:
    """Name, whether it is ours, and (MB, GB/s) of every contestant."""
    found = []
    for name in sizes[0].get("of", ()):
        found.append((name, name == "ours", [(size["size_kb"] / 1e3, size["of"][name]["bus_gb_s"]) for size in sizes]))
    if found:
        return found
    for group in ("ours", "baselines"):
        for name in sizes[0][group]:
            points = [(size["size_mb"], 2 * size["size_mb"] / _ms(size[group][name])) for size in sizes]
            found.append((name, group == "ours", points))
    return found


def _ms(metric: dict[str, float]) -> float:
    """Of an exchange; there and back where a baseline has no more."""
    return metric["exchange_ms"] if "exchange_ms" in metric else metric["up_ms"] + metric["down_ms"]
