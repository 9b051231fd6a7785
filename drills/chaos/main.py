"""ps-launch chaos: runs a real job under random kills, pauses, partitions and packet loss, and judges the result."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...common.config.cli import SetOption, make_app
from ...common.errors import UsageError
from .plan import KINDS, OF_SHARDS, check_kinds

if TYPE_CHECKING:
    from .job import Ending, Setup

PROGRAM = "ps-launch chaos"

app = make_app()


@app.command()
def chaos(
    config: Annotated[str | None, typer.Argument(metavar="CONFIG", help="YAML file; default the task ledger.")] = None,
    seconds: Annotated[float, typer.Option(min=5, help="Approximate length of the job.")] = 60,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the faults and of the run.")] = 1,
    workers: Annotated[int, typer.Option("-n", "--workers", min=1, help="Number of workers.")] = 4,
    mode: Annotated[str, typer.Option(help="An installed mode, or FILE.py:NAME.")] = "ssp",
    shards: Annotated[int, typer.Option(min=1, help="Number of server shards.")] = 1,
    faults: Annotated[str | None, typer.Option(metavar="KIND,...", help=f"Default all: {', '.join(KINDS)}; with shards "
                                               f"also {', '.join(OF_SHARDS)}.")] = None,
    transport: Annotated[str, typer.Option(help="Transport of the tensors: direct, grpc or shared.")] = "direct",
    model_mb: Annotated[float, typer.Option(min=0.2, max=1000, help="Size of the ledger's model in MB. An upload above "
                                            "16 MiB that is cut continues.")] = 0.2,
    keep: Annotated[str | None, typer.Option(metavar="DIR", help="Keep logs, history and weights there.")] = None,
    sets: SetOption = None,
) -> int:  # fmt: skip
    """Run a real job under random faults, then prove that nothing was lost or applied twice.

    Examples

      ps-launch chaos                                    4 workers, ssp, a minute
      ps-launch chaos --seed 7 --mode sync -n 3          other faults, another mode
      ps-launch chaos --shards 3 --mode sync             faults also hit the shards of the server
      ps-launch chaos --seconds 3600                     run for an hour
      ps-launch chaos --faults kill_server,partition     only these
      ps-launch chaos --faults cut --model-mb 40         uploads that continue after a cut
      ps-launch chaos configs/digits.yaml --seconds 30   your own job (only its history is checked)

    The same seed gives the same plan of faults. The exit code is 0 if the job ended without an error, every
    sample was applied exactly once, and its history keeps every guarantee. Otherwise it is 1.
    """
    import asyncio

    from .job import Chaos
    from .trial import TRANSPORTS, make_setup

    os.environ.setdefault("PS_OUTPUT__STORE", "false")  # the run store does not record drills
    if not sys.platform.startswith("linux"):
        raise UsageError("injecting faults needs Linux (/proc, pidfd)", fix="run it on Linux")
    kinds = check_kinds(faults, shards)
    if transport not in TRANSPORTS:
        raise UsageError(f"--transport {transport}: the transports are {', '.join(TRANSPORTS)}")
    chosen = {"run.workers": workers, "run.mode": mode, "worker.transports": TRANSPORTS[transport]}
    if shards > 1:
        chosen["server.shards"] = shards
    model_bytes = round(model_mb * 1e6)
    make = partial(make_setup, config, chosen, sets or [], seconds=seconds, seed=seed, model_bytes=model_bytes)
    make(folder=Path(), kinds=kinds)  # raises UsageError before anything starts
    setup = make(folder=_folder(keep), kinds=_possible(kinds))
    command = f"ps-launch chaos{' ' + config if config else ''} --seconds {seconds:g} --seed {seed} -n {workers}"
    command += f" --mode {mode} --transport {transport} --model-mb {model_mb:g}"
    command += (f" --shards {shards}" if shards > 1 else "") + "".join(f" --set {item}" for item in sets or ())
    print(f"chaos: {len(setup.plan)} faults planned; again: {command}", flush=True)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.2f} s  {text}", flush=True)

    ending = asyncio.run(Chaos(setup, say).run())
    return _judge(ending, setup, is_kept=keep is not None)


def _folder(keep: str | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="ps-chaos-"))
    folder = Path(keep)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--keep {keep}: {error.strerror}", fix="name a directory") from None
    if any(folder.iterdir()):
        raise UsageError(f"--keep {keep}: it is not empty", fix="name a new directory: one for each run")
    return folder


def _possible(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the kinds that can be injected here. `drop` needs a network namespace."""
    from .faults import enter_own_network

    why_not = enter_own_network() if "drop" in kinds else None
    if why_not is not None:
        print(f"chaos: no packets are dropped: {why_not}")
        kinds = tuple(kind for kind in kinds if kind != "drop")
    if not kinds:
        raise UsageError("no fault is left to inject", fix="name others with --faults")
    return kinds


def _judge(ending: Ending, setup: Setup, *, is_kept: bool) -> int:
    """Print the result, and return the exit code."""
    from .trial import judge

    failures: list[str] = []
    if not ending.signal_number:
        for title, counts in (("faults", ending.faults), ("the job", ending.events)):
            print(f"{title}: " + (", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"))
        failures = judge(ending, setup)
        for failure in failures:
            print(f"FAILED: {failure}")
        print(f"log, history, snapshots and weights are in {setup.folder}" if failures else "passed")
    if not failures and not is_kept:
        shutil.rmtree(setup.folder, ignore_errors=True)
    return 128 + ending.signal_number if ending.signal_number else int(bool(failures))
