"""The command line of ps-launch doctor. `run.py` has its work, and is imported once the flags are checked."""

from __future__ import annotations

from typing import Annotated

import typer

from ...common.config.cli import SetOption, make_app
from ...common.errors import raise_first
from .measure import TRANSPORTS

PROGRAM = "ps-launch doctor"

app = make_app()


@app.command()
def doctor(
    config: Annotated[str | None, typer.Argument(metavar="CONFIG", help="YAML file, see configs/.")] = None,
    workers: Annotated[int, typer.Option("-n", "--workers", min=1, help="Machines or processes to measure.")] = 2,
    hosts: Annotated[str | None, typer.Option(metavar="FILE.yaml", help="Machines, see docs/remote.md.")] = None,
    megabytes: Annotated[float | None, typer.Option("--mb", help="Size of the model; default: the task's.")] = None,
    compute: Annotated[str | None, typer.Option(metavar="TIME", help="Time of a step; default: measured.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Longest turn of a worker with each transport.")] = 0.3,
    budget: Annotated[float, typer.Option(min=1, metavar="S", help="Time limit for measuring.")] = 40.0,
    transports: Annotated[str, typer.Option(metavar="NAME,...", help="Measure only these.")] = ",".join(TRANSPORTS),
    verify: Annotated[bool, typer.Option("--verify", help="Also run each mode briefly, and compare.")] = False,
    pipeline: Annotated[bool, typer.Option("--pipeline", help="Measure stages of a pipeline instead.")] = False,
    regions: Annotated[bool, typer.Option("--regions", help="Find regions of close hosts instead.")] = False,
    num_regions: Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of regions.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Write the regions into the hosts file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    sets: SetOption = None,
) -> int:
    """Measure the machines and the network between them, and advise on the mode.

    Examples

      ps-launch doctor configs/digits.yaml             this machine, with that task's step and size
      ps-launch doctor configs/digits.yaml --hosts hosts.yaml -n 4
                                                       the machines of that file, one worker after another
      ps-launch doctor --mb 400 --compute 250ms        a model that does not exist yet
      ps-launch doctor configs/digits.yaml --verify    also measure the error of the advice, by real runs
      ps-launch doctor configs/gpt.yaml --pipeline --set launch.group=2
                                                       the layers of the model as stages of a pipeline
      ps-launch doctor --hosts hosts.yaml --regions    round trips between all hosts, and which are close
      ps-launch doctor --hosts hosts.yaml --regions --num-regions 2 --write
                                                       two regions, written into the hosts file

    Real processes exchange real frames. Each round sends the model over each transport, up alone and both
    ways. Measuring ends when three rounds of each worker's best transport agree within 5 %, or after
    --budget seconds. Ctrl-C shows the results so far (exit code 130). Nothing is saved. The exit code is 1
    if a run would fail here.
    """
    from ...simulate.machines.units import seconds as parsed
    from .run import examine

    if regions:
        raise_first((hosts is None, "flag --regions: there are no hosts to measure", "--hosts hosts.yaml"))
        from .regions import examine_regions

        return examine_regions(config, str(hosts), num_regions, write, sets or [], as_json)
    raise_first((write or num_regions, "flags --write and --num-regions belong to --regions", "add --regions"))
    compute_s = parsed("--compute", compute) if compute is not None else None
    chosen = [name.strip() for name in transports.split(",")]
    unknown = [name for name in chosen if name not in TRANSPORTS]
    raise_first(
        (compute_s is not None and compute_s <= 0, f"flag --compute: {compute}: the time of a step must be positive",
         "--compute 100ms"),
        (unknown, f"flag --transports: there is no transport '{next(iter(unknown), '')}'",
         f"known: {', '.join(TRANSPORTS)}"),
        (config is None and (megabytes is None or compute_s is None),
         "the model's size and the time of a step are unknown: no CONFIG is given",
         "ps-launch doctor configs/digits.yaml, or --mb 400 --compute 250ms"),
        (verify and (config is None or megabytes is not None or compute_s is not None),
         "flag --verify needs a task to run, not a size and a time", "give only a CONFIG with the task"),
    )  # fmt: skip
    if pipeline:
        from .measure import examine_pipeline

        return examine_pipeline(config, sets or [], as_json)
    return examine(
        config, hosts, sets or [], num_workers=workers, megabytes=megabytes, compute_s=compute_s, seconds=seconds,
        transports=tuple(chosen), budget_s=budget, verify=verify, as_json=as_json,
    )  # fmt: skip
