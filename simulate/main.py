"""The command line of ps-sim."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.config.cli import SetOption, discard_from_now_on, make_app, run_app
from ..common.errors import EXIT_INTERRUPTED, EXIT_OUTPUT_LOST, UsageError, raise_first
from ..common.user_code import is_in_file

if TYPE_CHECKING:
    from ..common.config.schema import Config
    from ..drills.history_lines import Line
    from .plan import Flags, Runs
    from .run.simulation import Simulation

PROGRAM = "ps-sim"

app = make_app()


@app.command()
def simulate(
    config: Annotated[str | None, typer.Argument(metavar="CONFIG", help="YAML file, see configs/.")] = None,
    mode: Annotated[str | None, typer.Option(metavar="MODE,...", help="Modes to compare; 'all': every mode.")] = None,
    workers: Annotated[int | None, typer.Option("-n", "--workers", min=1, help="Workers of the run.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps per worker.")] = None,
    megabytes: Annotated[float | None, typer.Option("--mb", help="Size of the model; default: the task's.")] = None,
    compute: Annotated[str, typer.Option(metavar="TIME", help="Mean time of a training step.")] = "100ms",
    jitter: Annotated[float, typer.Option(min=0, help="Standard deviation of a step, relative to its mean.")] = 0.1,
    speeds: Annotated[str, typer.Option(metavar="A,B,...", help="Speed factors, assigned to the ranks in turn.")] = "1",
    stragglers: Annotated[str | None, typer.Option(metavar="p=0.1,x=5", help="Slow steps: x times as long.")] = None,
    bandwidth: Annotated[str, typer.Option(metavar="RATE", help="Bandwidth of each worker's link.")] = "none",
    latency: Annotated[str, typer.Option(metavar="TIME", help="Round-trip time.")] = "0ms",
    server_bandwidth: Annotated[str, typer.Option(metavar="RATE", help="Bandwidth of the server's link.")] = "none",
    fold: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time to add a contribution; default: by --mb.")
    ] = None,
    step: Annotated[str | None, typer.Option(metavar="TIME", help="Time to make a version; default: by --mb.")] = None,
    failures: Annotated[str | None, typer.Option(metavar="mtbf=1h,back=30s", help="Failures of each worker.")] = None,
    join_at: Annotated[str | None, typer.Option(metavar="60s:4,10min", help="Workers that join later.")] = None,
    regions: Annotated[int | None, typer.Option(metavar="R", help="Regions, each with a relay; and flat.")] = None,
    upstream_every: Annotated[
        str, typer.Option(metavar="K,...", help="Steps between exchanges of regions; 0: each round, or as the mode.")
    ] = "0",
    border_bandwidth: Annotated[str, typer.Option(metavar="RATE", help="Bandwidth of a region's border.")] = "none",
    border_latency: Annotated[str, typer.Option(metavar="TIME", help="Round-trip time over a border.")] = "0ms",
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of all randomness.")] = None,
    trace: Annotated[str | None, typer.Option(metavar="HISTORY", help="A recorded run, written by --history.")] = None,
    learn: Annotated[bool, typer.Option("--learn", help="Train the task: loss over virtual time.")] = False,
    baseline: Annotated[bool, typer.Option("--baseline", help="Also simulate the same work on one machine.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print results as JSON.")] = False,
    report: Annotated[str | None, typer.Option(metavar="DIR", help="Directory of an HTML report.")] = None,
    sets: SetOption = None,
) -> int:
    """Simulate a run: the real rules of its mode, with workers, links and a server that you describe.

    Examples

      ps-sim configs/digits.yaml -n 64 --bandwidth 100mbit --latency 40ms --mode sync,ssp,async
                                                       compare modes
      ps-sim configs/digits.yaml --mb 400 -n 1000 --bandwidth 500mbit/110mbit --stragglers p=0.1,x=5
                                                       1,000 home links, one step in ten takes 5 times as long
      ps-sim configs/digits.yaml -n 6 --regions 2 --upstream-every 0,8,32 --border-bandwidth 10mbit
                                                       two regions: how often to exchange
      ps-sim configs/digits.yaml --trace history.jsonl replay all decisions of a recorded run, and
                                                       predict its second half from its first

    Times and bandwidths have units: 40ms, 100mbit, 12.5MB/s. A bandwidth may be DOWN/UP. All workers share
    the server's link. Only --learn, which really trains the task, shows a loss. Ctrl-C shows the results
    so far (exit code 130).
    """
    from .plan import Flags, alone, resolve, worlds
    from .recorded.replay import read_trace

    flags = Flags(
        megabytes, compute, jitter, speeds, stragglers, bandwidth, latency, server_bandwidth, fold, step, failures,
        join_at,
    )  # fmt: skip
    configs = resolve(config, mode, workers, {"run.steps": steps, "run.seed": seed}, sets or [], os.environ)
    with_trace = [name for name, value in (("--learn", learn), ("--baseline", baseline), ("--json", as_json)) if value]
    raise_first(
        (trace is not None and with_trace, f"flag {', '.join(with_trace)} with --trace: a recorded run has no data "
         "here, and its own times", "give one only"),
        (trace is not None and flags.of_machines, f"flag {flags.of_machines} with --trace: the workers are the "
         "recorded ones", "leave it out; links may differ: --bandwidth, --latency, --server-bandwidth"),
        (baseline and join_at is not None, "flag --baseline with --join-at: the work of workers that join later "
         "depends on when they join", "give one only"),
        (regions is not None and (trace or learn or baseline or failures or join_at), "flag --regions with --trace, "
         "--learn, --baseline, --failures or --join-at: regions are simulated without them", "leave them out"),
        (regions is None and (upstream_every, border_bandwidth, border_latency) != ("0", "none", "0ms"),
         "flag --upstream-every or --border-...: there are no regions", "--regions 2"),
    )  # fmt: skip
    try:
        runs = worlds(configs, flags)
        if regions is not None:
            from .regions import tiers

            runs = tiers(runs, regions, upstream_every, (border_bandwidth, border_latency), megabytes)
        if trace is not None:
            lines = read_trace(trace)
            if not _decides_the_same(lines, configs[0]):
                return 1
            runs = _foresee(lines, runs, flags, workers)
        return _compare([alone(*runs[0]), *runs] if baseline else runs, learn, baseline, as_json, report)
    except BrokenPipeError:
        discard_from_now_on(1)
        return EXIT_OUTPUT_LOST


def _decides_the_same(lines: list[Line], config: Config) -> bool:
    """Replay a recorded run and print the result."""
    from .recorded.replay import replay

    verdict = replay(lines, [mode for mode in config.run.modes if is_in_file(mode)])
    for note in verdict.notes:
        print(f"replay: {note}")
    if verdict.problem is None:
        print(f"replay: {verdict.num_decisions:,} decisions, all as recorded")
        return True
    print(f"replay: {verdict.num_decisions:,} decisions as recorded, then a different decision")
    print(f"{verdict.problem}\n  decided now: {verdict.decided}")
    print("  (a history does not record an early stop of a run, or a mode's own state in a snapshot)")
    return False


def _foresee(lines: list[Line], runs: Runs, flags: Flags, workers: int | None) -> Runs:
    """Print how well the first half of a recorded run predicts its second; returns the runs with fitted worlds."""
    from ..common.reporting.report import share
    from .plan import changed, framing_of
    from .recorded.replay import calibrate, config_of, fitted

    recorded, world = config_of(lines, runs[0][0]), runs[0][1]
    try:
        found = calibrate(lines, recorded, framing_of(recorded, world.sizes))
    except UsageError as error:
        print(f"calibration: none, {error.message}" + (f" ({error.fix})" if error.fix else ""))
        return runs
    was, is_, num = found.recorded, found.foreseen, found.world.num_workers
    print(f"calibration: {num} workers, {was.num:,} contributions of the second half by the first half")
    print(f"  a second: {was.rate:,.3g} recorded, {is_.rate:,.3g} predicted ({found.rate_error:+.1%})")
    print(f"  waiting: {share(was.wait_share)} recorded, {share(is_.wait_share)} predicted")
    if was.num_sent and was.num_received:
        for name in ("sent", "received"):
            before, now = (getattr(summary, f"num_{name}") for summary in (was, is_))
            print(f"  bytes {name}: {before:,} recorded, {now:,} predicted ({now / before - 1:+.3%})")
    print(f"  staleness: distributions differ by at most {share(found.staleness_distance)}")
    chosen, num = [], workers or num
    has_links = (flags.bandwidth, flags.latency, flags.server_bandwidth) != ("none", "0ms", "none")
    for config, world in runs:
        world = fitted(found, replace(world, num_workers=num), has_links)
        chosen.append((changed(config, run={"workers": num}), world))
    if far := found.outside(chosen[0][1]):
        print(f"  more than ten times away from the recording: {'; '.join(far)}")
    return chosen


def _compare(runs: Runs, learns: bool, has_baseline: bool, as_json: bool, report: str | None) -> int:
    """Simulate the runs, print and write the results, and return the exit code."""
    from ..common.reporting.log import setup_logging
    from ..common.reporting.report import comparison_table, report_console
    from ..web.stored import write_report
    from .results.summary import as_text, for_people, sentence, summary, time_cells, time_pictures, time_table

    setup_logging(runs[0][0].log.model_copy(update={"level": "warning"}), PROGRAM)
    gc.disable()  # a simulation makes millions of small objects and no cycles
    done, is_over = _simulated(runs, learns, has_baseline)
    if is_over:
        print(f"{PROGRAM}: ended: {len(done)} of {len(runs)} runs, the last run is incomplete", file=sys.stderr)
    if not done:
        return EXIT_INTERRUPTED
    first = done[0][1] if has_baseline else None
    found = [(label, summary(item, first)) for label, item in done]
    if report is not None:
        notes = [f"{label}: events {item.tally.digest}" for label, item in done]
        extra = [time_cells(done)], time_pictures(done)
        write_report(report, "Simulated runs", for_people(found), notes, extra=extra)
    if as_json:
        print(as_text(done, first))
        return EXIT_INTERRUPTED if is_over else 0
    console = report_console()
    console.print(comparison_table(for_people(found)))
    console.print()
    console.print(time_table(done))
    if late := [label for label, item in done if not all(worker.incarnation for worker in item.workers)]:
        print(f"{', '.join(late)}: ended before all workers of --join-at joined")
    for label, item in found if learns else ():
        print(f"\n{label}: loss over virtual time")
        for point in item.curve:
            print(f"  {point.elapsed_s:>12,.1f} s  step {point.step:>7,}  loss {point.metrics['loss']:.4f}")
    if not learns:
        print("no loss simulated (--learn)")
    print(sentence(found))
    return EXIT_INTERRUPTED if is_over else 0


def _simulated(runs: Runs, learns: bool, has_baseline: bool) -> tuple[list[tuple[str, Simulation]], bool]:
    """Returns the simulations with their labels, and whether Ctrl-C ended the last one."""
    from ..common.registry import mode_label
    from ..common.reporting.pictures.progress import Steps
    from .run.simulation import Simulation

    done: list[tuple[str, Simulation]] = []
    with Steps() as steps, interrupts_noted() as interrupts:
        for number, (config, world) in enumerate(runs):
            label = "single" if has_baseline and not number else world.label or mode_label(config.run.mode)

            def progressed(part: float, before: int = number, label: str = label) -> None:
                steps.at((before + part) / len(runs), f"simulating {label}")
                if interrupts:
                    raise KeyboardInterrupt

            learner = None
            if learns:
                from .learning.learner import Learner

                learner = Learner(config, world.num_workers)
            simulation = Simulation(config, world, time.perf_counter, learner=learner, progressed=progressed)
            try:
                simulation.go()
            except KeyboardInterrupt:
                return [*done, (f"{label}, ended", simulation)] if simulation.tally.num_steps else done, True
            done.append((label, simulation))
    return done, False


@contextmanager
def interrupts_noted() -> Iterator[list[int]]:
    """Append the first Ctrl-C to the list instead of raising. A second Ctrl-C raises KeyboardInterrupt."""
    interrupts: list[int] = []

    def note(number: int, frame: object) -> None:
        interrupts.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> None:
    """Entry point of `ps-sim`."""
    run_app(app, PROGRAM)
