"""The sweep as a picture: what each contestant carries, by size."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from ...common.errors import OutputError, UsageError
from ...common.reporting.output import check_writable

if TYPE_CHECKING:
    from .report import Report

_SIZE_INCHES, _DPI = (9, 5.5), 120


def check_plot(path: str | None, sweep: bool) -> None:
    """Raise UsageError or OutputError now for what could not be drawn at the end."""
    if path is None:
        return
    if not sweep:
        raise UsageError("--plot draws a sweep", fix="add --sweep")
    if not can_plot():
        raise UsageError("--plot needs matplotlib, which is not installed", fix="pip install matplotlib")
    if not path.endswith(".png"):
        raise UsageError(f"--plot {path}: the picture is a PNG", fix=f"--plot {path}.png")
    check_writable(path)


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def plot_sweep(report: Report, path: str) -> None:
    """Megabytes there and back through the time of an exchange, or what a link of a ring carries in an all-reduce;
    OutputError when `path` cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=_SIZE_INCHES)
    for name, is_ours, points in curves(report.results["sizes"]):
        sizes, rates = zip(*points, strict=True)
        axes.plot(sizes, rates, "o-" if is_ours else ".--", label=name, linewidth=2 if is_ours else 1)
    what, rate = "One exchange", "GB/s, up and down together"
    if "of" in report.results["sizes"][0]:
        what, rate = "One all-reduce", "bus bandwidth, GB/s"
    axes.set(xscale="log", yscale="log", xlabel="size of the model, MB", ylabel=rate)
    axes.set_title(f"{what} by size; {report.title}", fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=_DPI, bbox_inches="tight")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}", fix="choose a path you may write to") from None
    finally:
        pyplot.close(figure)


def curves(sizes: list[dict[str, Any]]) -> list[tuple[str, bool, list[tuple[float, float]]]]:
    """Name, whether it is ours, and (MB, GB/s) of every contestant."""
    found = []
    for name in sizes[0].get("of", ()):
        found.append((name, name == "ours", [(size["size_kb"] / 1e3, size["of"][name]["bus_gb_s"]) for size in sizes]))
    if found:
        return found
    for group in ("ours", "peers"):
        for name in sizes[0][group]:
            points = [(size["size_mb"], 2 * size["size_mb"] / _ms(size[group][name])) for size in sizes]
            found.append((name, group == "ours", points))
    return found


def _ms(metric: dict[str, float]) -> float:
    """Of an exchange; there and back where a peer has no more."""
    return metric["exchange_ms"] if "exchange_ms" in metric else metric["up_ms"] + metric["down_ms"]
