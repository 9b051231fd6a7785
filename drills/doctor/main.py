"""ps-launch doctor: the command."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ...common.config.cli import SetOption, make_app, run_app
from ...common.config.sources import load_config, of_mode
from ...common.errors import ParamServerError, UsageError
from ...common.reporting.report import report_console, share, size
from ...common.reporting.summary import Summary
from ...launch.plan.hosts import load_hosts
from ...launch.plan.placement import place_servers, place_workers
from . import advice
from .measure import LANES, TINY_MB, Job, Measured, measure

PROGRAM = "ps-launch doctor"
_STEPS = 30

_HELP = """\b
Measure the machines and the network between them, and say which mode that carries.

[bold]Examples[/bold]

  ps-launch doctor configs/digits.yaml             this machine, with that task's step and size
  ps-launch doctor configs/digits.yaml --hosts hosts.yaml -n 4
                                                   the machines of that file, one worker after another
  ps-launch doctor --mb 400 --compute 250ms        a model that is not there yet
  ps-launch doctor configs/digits.yaml --verify    and how wrong the advice is, by real runs

Real processes exchange real frames: round trips first, then the model over each lane, the way up
alone and both ways. Nothing is kept. Exit code 1 when something would fail a run.
"""

app = make_app(_HELP)


@app.command(help=_HELP)
def doctor(
    config: Annotated[str | None, typer.Argument(metavar="CONFIG", help="YAML file, see configs/.")] = None,
    workers: Annotated[int, typer.Option("-n", "--workers", min=1, help="Machines or processes to measure.")] = 2,
    hosts: Annotated[str | None, typer.Option(metavar="FILE.yaml", help="Machines, see docs/remote.md.")] = None,
    megabytes: Annotated[float | None, typer.Option("--mb", help="Size of the model; none: the task's.")] = None,
    compute: Annotated[str | None, typer.Option(metavar="TIME", help="Of a step; none: the task's, measured.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each measurement and worker.")] = 1.0,
    lanes: Annotated[str, typer.Option(metavar="NAME,...", help="Only these.")] = ",".join(LANES),
    verify: Annotated[bool, typer.Option("--verify", help="Run each mode for a moment, beside what was said.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
    sets: SetOption = None,
) -> int:
    from ...simulate.machines.units import seconds as parsed

    compute_s = parsed("--compute", compute) if compute is not None else None
    if compute_s is not None and compute_s <= 0:
        raise UsageError(f"flag --compute: {compute}: a step takes some time", fix="--compute 100ms")
    chosen = [name.strip() for name in lanes.split(",")]
    if unknown := [name for name in chosen if name not in LANES]:
        raise UsageError(f"flag --lanes: there is no lane '{unknown[0]}'", fix=f"known: {', '.join(LANES)}")
    if config is None and (megabytes is None or compute_s is None):
        raise UsageError("neither a CONFIG nor what it would say: the model's size and a step's time",
                         fix="ps-launch doctor configs/digits.yaml, or --mb 400 --compute 250ms")  # fmt: skip
    if verify and (config is None or megabytes is not None or compute_s is not None):
        raise UsageError(
            "flag --verify: a size and a time are nothing that could be run", fix="a CONFIG alone, whose task is"
        )
    machines = ["--hosts", hosts, "--sync-code"] if hosts else []
    where, sets = (*([config] if config else []), "-n", str(workers), *machines), sets or []
    load_config(config, {}, sets, {}, is_worker=False)
    if compute_s is None or megabytes is None:
        _say("a step of the task")
        found_s, found_mb = _step(where, seconds, sets)
        compute_s, megabytes = compute_s or found_s, megabytes or found_mb
    found = measure(Job((*where, *_sets("async", sets)), seconds, workers, _say), megabytes, chosen)
    if hosts:
        found.server = _server_of(hosts, workers, seconds, sets)
    links = advice.best_links(found)
    if not links:
        why = f": {found.refused[0][2]}" if found.refused else ""
        raise UsageError(f"no worker was given a lane of {lanes}{why}", fix="leave --lanes out")
    link = advice.typical(links)
    trip_s = sorted(trip for trip, _ in found.round_trips.values())[len(found.round_trips) // 2]
    foreseen = advice.foresee(config, workers, megabytes, compute_s, link, trip_s, sets)
    checks = advice.checks(found)
    told = advice.sentences(foreseen, link, trip_s, compute_s, megabytes)
    over = f"worker.lanes={','.join(dict.fromkeys([*chosen, 'grpc']))}"
    beside = _verified(where, foreseen, seconds, workers, [*sets, over]) if verify else []
    if as_json:
        print(_as_json(found, checks, foreseen, told, beside, compute_s))
    else:
        _show(found, checks, foreseen, told, beside)
    return 1 if any(one.level == "fail" for one in checks) else 0


def _server_of(hosts: str, num_workers: int, seconds: float, sets: list[str]) -> dict[str, Any]:
    """What the probe says on the machine of the server, which keeps snapshots and optimizer state; empty where a worker
    is there and says it."""
    known = load_hosts(hosts)
    host = place_servers(known, 1)[0]
    if host.host in {one.host for one in place_workers(known, num_workers)}:
        return {}
    _say(f"the server's machine, {host.host}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hosts.yaml"
        alone = {**host.model_dump(mode="json", exclude_defaults=True), "slots": 1}
        path.write_text(json.dumps({"hosts": [alone]}))  # JSON is YAML
        where = ("-n", "1", "--hosts", str(path), "--sync-code", *_sets("async", sets))
        return Job(where, seconds, 1, _say).probe(TINY_MB, "direct")[0][0]


def _say(what: str) -> None:
    print(f"measuring {what}", file=sys.stderr, flush=True)


def _sets(mode: str, sets: list[str]) -> list[str]:
    """As flags, without what is other modes'."""
    return [f"--set={one}" for one in of_mode(mode, {}, sets)[1]]


def _ran(where: tuple[str, ...], mode: str, steps: int, sets: list[str]) -> Summary:
    """What a short run came to. ParamServerError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "summary.json"
        quiet = [
            "output.store=false",
            "output.save=null",
            "output.history=null",
            "checkpoint.dir=null",
            "run.eval_every=null",
            *sets,
        ]
        command = [
            sys.executable, "-m", "paramserver.launch", *where, "--mode", mode, "--steps", str(steps), "--summary",
            str(path), *_sets(mode, quiet),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not path.exists():
            last = "\n".join((done.stderr or done.stdout).splitlines()[-8:])
            error = ParamServerError(
                f"a run of {steps} steps in {mode} ended with exit code {done.returncode}:\n{last}"
            )
            error.exit_code = done.returncode or 1
            raise error
        return Summary.model_validate_json(path.read_text())


def _step(where: tuple[str, ...], seconds: float, sets: list[str]) -> tuple[float, float]:
    """Seconds that a step of the task computes, and the megabytes of its gradients: of quick steps so many that the
    first, which is slow, does not count."""
    steps = _STEPS
    while True:
        ran = _ran(where, "async", steps, sets)
        num_steps = sum(worker.steps for worker in ran.workers)
        compute_s = sum(worker.compute_s for worker in ran.workers) / num_steps
        if steps > _STEPS or steps * compute_s >= seconds:
            return compute_s, sum(worker.bytes_sent for worker in ran.workers) / num_steps / 1e6
        steps = math.ceil(seconds / compute_s)


def _verified(
    where: tuple[str, ...], foreseen: list[advice.Foreseen], seconds: float, workers: int, sets: list[str]
) -> list[tuple[advice.Foreseen, float]]:
    """Every mode raw and the first with every codec, as real runs of some `seconds` and at least three rounds: steps a
    second of all workers while they train."""
    found = []
    for one in foreseen:
        if one.codec != advice.CODECS[0] and one.mode != advice.MODES[0]:
            continue
        _say(f"{one.mode}, {one.codec}, for real")
        codecs = [f"{way}={one.codec}" for way in ("worker.codec", "worker.answer_codec")]
        rounds = max(3, round(seconds * one.steps_per_s / workers / one.local_steps))
        ran = _ran(where, one.mode, rounds * one.local_steps, [*sets, *codecs, f"policy.local_steps={one.local_steps}"])
        found.append((one, workers / ran.step_s if ran.step_s else ran.steps_per_s))
    return found


def _as_json(
    found: Measured, checks: list[advice.Finding], foreseen: list[advice.Foreseen], told: list[str],
    beside: list[tuple[advice.Foreseen, float]], compute_s: float,
) -> str:  # fmt: skip
    trips = {rank: {"median_s": trip, "p99_s": worst} for rank, (trip, worst) in found.round_trips.items()}
    return json.dumps({
        "megabytes": found.megabytes, "compute_s": compute_s, "security": found.security,
        "machines": found.machines, "server": found.server, "clocks_s": found.clocks, "round_trips": trips,
        "links": [link.fields() for link in found.links], "checks": [asdict(one) for one in checks],
        "foreseen": [asdict(one) for one in foreseen], "advice": told,
        "verified": [
            {"mode": one.mode, "codec": one.codec, "foreseen": one.steps_per_s, "measured": rate}
            for one, rate in beside
        ],
    }, indent=2)  # fmt: skip


def _show(
    found: Measured, checks: list[advice.Finding], foreseen: list[advice.Foreseen], told: list[str],
    beside: list[tuple[advice.Foreseen, float]],
) -> None:  # fmt: skip
    console = report_console()
    columns = ("up MB/s", "down MB/s", "exchange", "all at once", "round trip", "99 %")
    links = Table("worker", "host", "lane", *columns, box=None)
    for link in sorted(found.links, key=lambda one: (one.rank, one.exchange_s)):
        trip, worst = found.round_trips[link.rank]
        links.add_row(
            str(link.rank), str(found.machines[link.rank]["host"]), link.lane, f"{link.up / 1e6:,.1f}",
            f"{link.down / 1e6:,.1f}", f"{link.exchange_s * 1e3:,.1f} ms",
            f"{link.together:.1f} times" if link.together > 1 else "", f"{trip * 1e3:.2f} ms", f"{worst * 1e3:.2f} ms",
        )  # fmt: skip
    console.print(links)
    console.print(_machines(found))
    for check in checks:
        style = {"ok": "green", "warn": "yellow", "fail": "red"}[check.level]
        console.print(f"{check.level}: {check.text}" + (f"; {check.fix}" if check.fix else ""), style=style)
    modes = Table("mode", "local steps", *(f"{codec} steps/s" for codec in advice.CODECS), "of ideal", box=None)
    for mode in dict.fromkeys(one.mode for one in foreseen):
        row = {one.codec: one for one in foreseen if one.mode == mode}
        local = "/".join(dict.fromkeys(str(one.local_steps) for one in row.values()))
        cells = [f"{row[codec].steps_per_s:,.1f}" if codec in row else "-" for codec in advice.CODECS]
        modes.add_row(mode, local, *cells, " ".join(share(one.of_ideal) for one in row.values()))
    console.print(modes)
    if beside:
        real = Table("mode", "codec", "foreseen", "measured", "error", box=None)
        for one, rate in beside:
            error = f"{one.steps_per_s / rate - 1:+.0%}" if rate else "-"
            real.add_row(one.mode, one.codec, f"{one.steps_per_s:,.1f}", f"{rate:,.1f}", error)
        console.print(real)
    for sentence in told:
        console.print(sentence, highlight=False)


def _machines(found: Measured) -> Table:
    """Also what is as it should be."""
    names = (
        "clock",
        "cores",
        "load",
        "memory free",
        "disk free",
        "shm free",
        "1 MiB on disk",
        "files",
        "GPUs",
        "security",
    )
    table = Table("machine", *names, box=None)
    rows = [(f"worker {rank}", one, found.clocks.get(rank)) for rank, one in sorted(found.machines.items())]
    if found.server:
        rows.append(("server", found.server, found.server["arrived"] - found.server["time"]))
    for name, one, behind_s in rows:
        written = f"{one['fsync_s'] * 1e3:.1f} ms" if one["fsync_s"] >= 0 else "no"
        table.add_row(
            f"{name} ({one['host']})", "-" if behind_s is None else f"{behind_s:+.2f} s", str(one["cores"]),
            f"{one['load']:.1f}", *(size(one[f"free_{what}"]) for what in ("memory", "disk", "shm")), written,
            f"{one['files']:,}", str(one["cuda"]), found.security,
        )  # fmt: skip
    return table


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    if arguments is not None:
        sys.argv[1:] = arguments
    run_app(app, PROGRAM)
