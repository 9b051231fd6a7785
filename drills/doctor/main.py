"""ps-launch doctor: its command line. What it does is in `run.py`, imported when the flags are known to be good."""

from __future__ import annotations

from typing import Annotated

import typer

from ...common.config.cli import SetOption, make_app
from ...common.errors import UsageError
from .measure import TRANSPORTS

PROGRAM = "ps-launch doctor"

_HELP = """
Measure the machines and the network between them, and say which mode that carries.

Examples

  ps-launch doctor configs/digits.yaml             this machine, with that task's step and size
  ps-launch doctor configs/digits.yaml --hosts hosts.yaml -n 4
                                                   the machines of that file, one worker after another
  ps-launch doctor --mb 400 --compute 250ms        a model that is not there yet
  ps-launch doctor configs/digits.yaml --verify    and how wrong the advice is, by real runs

Real processes exchange real frames: the model over each transport, the way up alone and both ways,
round by round until three rounds agree within 5 %, or until --budget seconds are over. Ctrl-C shows
what has been measured so far (exit code 130). Nothing is kept. Exit code 1 when something would fail
a run.
"""

app = make_app(_HELP)


@app.command(help=_HELP)
def doctor(
    config: Annotated[str | None, typer.Argument(metavar="CONFIG", help="YAML file, see configs/.")] = None,
    workers: Annotated[int, typer.Option("-n", "--workers", min=1, help="Machines or processes to measure.")] = 2,
    hosts: Annotated[str | None, typer.Option(metavar="FILE.yaml", help="Machines, see docs/remote.md.")] = None,
    megabytes: Annotated[float | None, typer.Option("--mb", help="Size of the model; none: the task's.")] = None,
    compute: Annotated[str | None, typer.Option(metavar="TIME", help="Of a step; none: the task's, measured.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of a worker's turn, each round and transport.")] = 0.3,
    budget: Annotated[float, typer.Option(min=1, metavar="S", help="Stop measuring after so long.")] = 40.0,
    transports: Annotated[str, typer.Option(metavar="NAME,...", help="Only these.")] = ",".join(TRANSPORTS),
    verify: Annotated[bool, typer.Option("--verify", help="Run each mode for a moment, beside what was said.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
    sets: SetOption = None,
) -> int:
    from ...simulate.machines.units import seconds as parsed

    compute_s = parsed("--compute", compute) if compute is not None else None
    if compute_s is not None and compute_s <= 0:
        raise UsageError(f"flag --compute: {compute}: a step takes some time", fix="--compute 100ms")
    chosen = [name.strip() for name in transports.split(",")]
    if unknown := [name for name in chosen if name not in TRANSPORTS]:
        raise UsageError(
            f"flag --transports: there is no transport '{unknown[0]}'", fix=f"known: {', '.join(TRANSPORTS)}"
        )
    if config is None and (megabytes is None or compute_s is None):
        raise UsageError("neither a CONFIG nor what it would say: the model's size and a step's time",
                         fix="ps-launch doctor configs/digits.yaml, or --mb 400 --compute 250ms")  # fmt: skip
    if verify and (config is None or megabytes is not None or compute_s is not None):
        raise UsageError(
            "flag --verify: a size and a time are nothing that could be run", fix="a CONFIG alone, whose task is"
        )
    from .run import Request, examine

    return examine(
        Request(
            config, workers, hosts, megabytes, compute_s, seconds, tuple(chosen), budget, verify, as_json, sets or []
        )
    )
