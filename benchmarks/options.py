"""Options of the ps-bench commands, their checks, and the output of reports."""

from __future__ import annotations

import math
import os
import re
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from .output.report import Report

# Options by their panel in --help.
of_size = partial(typer.Option, rich_help_panel="Size")
of_run = partial(typer.Option, rich_help_panel="Run")
of_output = partial(typer.Option, rich_help_panel="Output")

MbOption = Annotated[int, of_size("--mb", min=1, help="Size of the model, float32, MB.")]
ModeOption = Annotated[str, of_run("--mode", help="sync, async, ssp or localsgd")]
OptimizerOption = Annotated[str, of_run("--optimizer", help="sgd, adam, adamw, ...")]
TransportOption = Annotated[str, of_run("--transport", help="grpc, direct, shared (memory, same host) or all")]
DeviceOption = Annotated[str, of_run("--device", metavar="cpu|cuda[:I]", help="Where the worker's model is.")]
BaselinesOption = Annotated[
    str | None, of_run("--baselines", metavar="NAMES", help="Measured too, e.g. gloo,ray; all.")
]
JsonOption = Annotated[str | None, of_output("--json", metavar="FILE", help="Write metrics, machine and versions too.")]
KeepOption = Annotated[bool, of_output("--keep", help="Write them to benchmarks/results.")]


def check_bench_device(name: str) -> None:
    """Raise UsageError for a device that this machine lacks."""
    from ..common.config.preflight import check_device

    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UsageError(f"--device {name}: no such device", fix="cpu, cuda or cuda:I")
    check_device(name)


def check_transport(transport: str) -> None:
    """Raise UsageError for an unknown transport."""
    from .rig.ours import TRANSPORTS

    if transport not in TRANSPORTS:
        raise UsageError(f"unknown transport '{transport}'", fix=did_you_mean(transport, TRANSPORTS))


def check_baselines(text: str | None) -> list[str]:
    """Names of the baselines' files. UsageError with the nearest name for an unknown one."""
    from .baselines.base import split_names

    return split_names(text)


def check_range(min_kb: int, max_mb: int) -> None:
    """Raise UsageError for a sweep without sizes."""
    if min_kb > max_mb * 1000:
        raise UsageError(f"--min-kb {min_kb} is above --max-mb {max_mb}", fix=f"--min-kb is at most {max_mb * 1000}")


def numbers(text: str, flag: str, most: int) -> list[int]:
    """`1,4,16`. UsageError for what is no number from 1 to `most`."""
    found = []
    for part in text.split(","):
        if not part.strip().isdigit() or not 1 <= int(part) <= most:
            raise UsageError(f"{flag}: '{part}' is no whole number from 1 to {most:,}", fix=f"e.g. {flag} 1,4")
        found.append(int(part))
    return found


def checked(mode: str, optimizer: str, json_path: str | None, keep: bool) -> tuple[str, str]:
    """Mode and optimizer by their own names, before anything starts. Raises UsageError and OutputError."""
    from ..common.config.cli import before_torch
    from ..common.registry import canonical_mode

    mode = canonical_mode(mode)
    prepare(json_path, keep)
    before_torch()
    from ..common.tensors.optimizers import find_optimizer

    return mode, find_optimizer(optimizer).__name__.lower()


def quantity(text: str, flag: str, units: dict[str, float], example: str) -> float:
    """`100mbit` or `20ms` in the first of `units`, by how many of it each is. UsageError for anything else."""
    found = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(units)})", text.strip().lower())
    if not found:
        raise UsageError(f"{flag} {text}: no number with a unit of {', '.join(units)}", fix=f"e.g. {flag} {example}")
    return float(found[1]) * units[found[2]]


def fractions(text: str, flag: str) -> tuple[float, ...]:
    """`0.001,0.002`. UsageError for what is no number above 0."""
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or not all(0 < number < math.inf for number in found):
        raise UsageError(f"{flag} {text}: not numbers above 0, with commas", fix=f"e.g. {flag} 0.001,0.002")
    return found


def check_task(name: str) -> str:
    """A built-in task or FILE.py:NAME, as the configuration takes it. UsageError otherwise."""
    from ..common.registry import TASKS

    return name if ".py:" in name else TASKS.check(name)


def prepare(json_path: str | None, keep: bool) -> None:
    """Check the file of the metrics, and forget the user's settings: neither workers nor servers see them."""
    from ..common.reporting.output import check_writable
    from .rig.server_process import clean_environment

    if json_path is not None:
        check_writable(json_path)
    if keep:
        from .output.report import kept_path

        check_writable(str(kept_path("probe", ".json")))
    for name in os.environ.keys() - clean_environment().keys():
        del os.environ[name]


def show(report: Report, json_path: str | None, keep: bool, plot: str | None = None) -> None:
    """Print the table, and write metrics and picture on request."""
    from ..common.reporting.report import report_console
    from .output.plot import can_plot, draw
    from .output.report import kept_path

    console = report_console()
    console.print(report.table)
    if json_path is not None:
        report.write(json_path)
    if plot is not None:
        draw(report, plot)
    if keep:
        path = kept_path(report.kept_name, ".json")
        report.write(str(path))
        if report.has_picture and can_plot():
            draw(report, str(path.with_suffix(".png")))
        console.print(f"kept as {path.name}", style="dim")
