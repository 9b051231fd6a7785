"""ps-bench: the command line. What a benchmark needs is imported once the flags are known to be good."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.cli import Drained, make_app, run_app

if TYPE_CHECKING:
    from .results import Report

_HELP = """\b
Measure exchanges, latency and memory: the real programs, over loopback.

[bold]Examples[/bold]

  ps-bench exchange                     100 MB up, optimizer, 100 MB down
  ps-bench exchange --optimizer adam --codec bf16
  ps-bench latency --json latency.json  a small exchange, and a bare ping-pong
  ps-bench memory --workers 4           the server's peak, and its parts

Tables go to standard output. PS_... in the environment is left out: what a
benchmark measures is what its flags say.
"""

_SIZE, _RUN, _OUTPUT = "Size", "Run", "Output"

MbOption = Annotated[int, typer.Option("--mb", min=1, help="Size of the model, float32, MB.", rich_help_panel=_SIZE)]
ModeOption = Annotated[str, typer.Option("--mode", help="sync, async, ssp or localsgd", rich_help_panel=_RUN)]
OptimizerOption = Annotated[str, typer.Option("--optimizer", help="sgd, adam, adamw, ...", rich_help_panel=_RUN)]
JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write figures, machine and versions too.", rich_help_panel=_OUTPUT),
]

app = make_app(_HELP)


@app.callback(help=_HELP)
def bench() -> None:
    pass


@app.command(help="A large model: time of one exchange, GB/s up and down, the server's time between.")
def exchange(
    mb: MbOption = 100,
    runs: Annotated[int, typer.Option(min=1, help="Exchanges measured, after 3 to warm up.", rich_help_panel=_RUN)] = 7,
    mode: ModeOption = "sync",
    optimizer: OptimizerOption = "sgd",
    codec: Annotated[str, typer.Option(help="How contributions are encoded.", rich_help_panel=_RUN)] = "raw",
    json_path: JsonOption = None,
) -> None:
    from ..common.registry import CODECS

    CODECS.check(codec)
    mode, optimizer = _checked(mode, optimizer, json_path)
    from .exchange import ExchangeOptions, measure_exchange

    _show(measure_exchange(ExchangeOptions(mb, runs, mode, optimizer, codec)), json_path)


@app.command(help="A small model: microseconds per exchange, beside a bare gRPC ping-pong of the same size.")
def latency(
    floats: Annotated[int, typer.Option(min=1, help="Parameters of the model.", rich_help_panel=_SIZE)] = 203,
    exchanges: Annotated[int, typer.Option(min=10, help="Exchanges measured.", rich_help_panel=_RUN)] = 2000,
    mode: ModeOption = "sync",
    optimizer: OptimizerOption = "sgd",
    json_path: JsonOption = None,
) -> None:
    mode, optimizer = _checked(mode, optimizer, json_path)
    from .latency import LatencyOptions, measure_latency

    _show(measure_latency(LatencyOptions(floats, exchanges, mode, optimizer)), json_path)


@app.command(help="The server's peak memory with Adam in sync mode, beside what it has to hold.")
def memory(
    mb: MbOption = 100,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes.", rich_help_panel=_RUN)] = 4,
    json_path: JsonOption = None,
) -> None:
    _prepare(json_path)
    from .memory import MemoryOptions, measure_memory

    _show(measure_memory(MemoryOptions(mb, workers)), json_path)


def _checked(mode: str, optimizer: str, json_path: str | None) -> tuple[str, str]:
    """Mode and optimizer by their own names, before anything starts. Raises UsageError and OutputError."""
    from ..common.cli import before_torch
    from ..common.registry import canonical_mode

    mode = canonical_mode(mode)
    _prepare(json_path)
    before_torch()
    from ..common.optimizers import find_optimizer

    return mode, find_optimizer(optimizer).__name__.lower()


def _prepare(json_path: str | None) -> None:
    """Check the file of the figures, and forget the user's settings: neither workers nor servers see them."""
    from ..common.output import check_writable
    from .server_process import clean_environment

    if json_path is not None:
        check_writable(json_path)
    for name in os.environ.keys() - clean_environment().keys():
        del os.environ[name]


def _show(report: Report, json_path: str | None) -> None:
    from ..common.report import report_console

    report_console().print(report.table)
    if json_path is not None:
        report.write(json_path)


def _drain(*_: object) -> None:
    raise Drained  # so that every server is stopped on the way out


def main() -> None:
    """Entry point of `ps-bench`."""
    signal.signal(signal.SIGTERM, _drain)
    run_app(app, "ps-bench")


if __name__ == "__main__":
    main()
