"""ps-sim: what a run would take on other machines and links, without them."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

import typer

from ..common.config.cli import SetOption, make_app, run_app
from ..common.errors import EXIT_INTERRUPTED, UsageError
from ..common.user_code import is_in_file

PROGRAM = "ps-sim"
_EXIT_OUTPUT_LOST = 141  # 128 + SIGPIPE

_HELP = """Simulate a run: the real rules of its mode, and workers, links and a server that you describe.

Examples

  ps-sim configs/digits.yaml -n 64 --bandwidth 100mbit --latency 40ms --mode sync,ssp,async
                                                   what each mode would make of it
  ps-sim configs/digits.yaml --mb 400 -n 1000 --bandwidth 500mbit/110mbit --stragglers p=0.1,x=5
                                                   1,000 home links, one step in ten takes 5 times as long
  ps-sim configs/digits.yaml --trace history.jsonl as a recorded run decided, all of it; and does
                                                   the simulator foresee its second half?

Times and bandwidths have units: 40ms, 100mbit, 12.5MB/s; DOWN/UP as a provider says it. A server's
own link is shared by all. No loss is simulated without --learn, which trains the task for real.
Ctrl-C shows what has been simulated so far (exit code 130).
"""

app = make_app(_HELP)


@app.command(help=_HELP)
def simulate(
    config: Annotated[str | None, typer.Argument(metavar="CONFIG", help="YAML file, see configs/.")] = None,
    mode: Annotated[str | None, typer.Option(metavar="MODE,...", help="Compare these; 'all': every mode.")] = None,
    workers: Annotated[int | None, typer.Option("-n", "--workers", min=1, help="Workers of the run.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps per worker.")] = None,
    megabytes: Annotated[float | None, typer.Option("--mb", help="Size of the model; none: of the task's.")] = None,
    compute: Annotated[str, typer.Option(metavar="TIME", help="Of a training step, mean.")] = "100ms",
    jitter: Annotated[float, typer.Option(min=0, help="Its standard deviation, as a part of it.")] = 0.1,
    speeds: Annotated[str, typer.Option(metavar="A,B,...", help="Of the ranks in turn, as factors.")] = "1",
    stragglers: Annotated[str | None, typer.Option(metavar="p=0.1,x=5", help="Slow steps, x times as long.")] = None,
    bandwidth: Annotated[str, typer.Option(metavar="RATE", help="Of each worker's link.")] = "none",
    latency: Annotated[str, typer.Option(metavar="TIME", help="There and back.")] = "0ms",
    server_bandwidth: Annotated[str, typer.Option(metavar="RATE", help="Of the server's, which all share.")] = "none",
    fold: Annotated[str | None, typer.Option(metavar="TIME", help="To add a contribution; none: by --mb.")] = None,
    step: Annotated[str | None, typer.Option(metavar="TIME", help="To make a version; none: by --mb.")] = None,
    failures: Annotated[str | None, typer.Option(metavar="mtbf=1h,back=30s", help="Of each worker.")] = None,
    join_at: Annotated[str | None, typer.Option(metavar="60s:4,10min", help="So many more workers join.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same events.")] = None,
    trace: Annotated[str | None, typer.Option(metavar="HISTORY", help="A recorded run, of --history.")] = None,
    learn: Annotated[bool, typer.Option("--learn", help="Train the task: loss over virtual time.")] = False,
    baseline: Annotated[bool, typer.Option("--baseline", help="And the same work on one machine.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Results as JSON.")] = False,
    report: Annotated[str | None, typer.Option(metavar="DIR", help="And as HTML and Markdown.")] = None,
    sets: SetOption = None,
) -> int:
    from ..common.registry import mode_label
    from .plan import Told, alone, resolve, worlds
    from .recorded.traces import read_trace

    flags = {"run.steps": steps, "run.seed": seed}
    told = Told(
        megabytes, compute, jitter, speeds, stragglers, bandwidth, latency, server_bandwidth, fold, step, failures,
        join_at,
    )  # fmt: skip
    configs = resolve(config, mode, workers, flags, sets or [], os.environ)
    if trace is not None and (learn or baseline or as_json):
        flag = "--learn" if learn else "--baseline" if baseline else "--json"
        raise UsageError(
            f"flag {flag} with --trace: a recorded run has no data here, and its own times", fix="one only"
        )
    if trace is not None and (flag := told.of_machines):
        raise UsageError(
            f"flag {flag} with --trace: its workers are the recorded ones",
            fix="leave it out; links may be others: --bandwidth, --latency, --server-bandwidth",
        )
    if baseline and join_at is not None:
        raise UsageError(
            "flag --baseline with --join-at: how much work workers do that join later depends on when", fix="one only"
        )
    try:
        runs = worlds(configs, told)
        if trace is not None:
            lines = read_trace(trace)
            if not _decides_the_same(lines, configs[0]):
                return 1
            runs = _foresee(lines, runs, told, workers)
        labels = [mode_label(item.run.mode) for item, _ in runs]
        if baseline:
            runs, labels = [alone(*runs[0]), *runs], ["single", *labels]
        return _compare(runs, labels, learn, baseline, as_json, report)
    except BrokenPipeError:
        from ..launch.view.screen import discard_from_now_on

        discard_from_now_on(1)
        return _EXIT_OUTPUT_LOST


def _decides_the_same(lines: list[Any], config: Any) -> bool:
    """Replay a recorded run, and say what came of it."""
    from .recorded.replay import replay

    verdict = replay(lines, [mode for mode in config.run.modes if is_in_file(mode)])
    for note in verdict.notes:
        print(f"replay: {note}")
    if verdict.problem is None:
        print(f"replay: {verdict.num_decisions:,} decisions, all as recorded")
        return True
    print(f"replay: {verdict.num_decisions:,} decisions as recorded, and then another one")
    print(f"{verdict.problem}\n  decided now: {verdict.decided}")
    print("  (a history does not tell that a run was stopped early, nor a mode's own state in a snapshot)")
    return False


def _foresee(lines: list[Any], runs: list[Any], told: Any, workers: int | None) -> list[Any]:
    """Say how well the second half of the recorded run is foreseen from its first; the runs with what was fitted."""
    from ..common.reporting.report import share
    from .recorded.fit import calibrate, fitted
    from .recorded.traces import config_of, framing_of

    try:
        found = calibrate(lines, config_of(lines, runs[0][0]), framing_of(lines, *runs[0]))
    except UsageError as error:
        print(f"calibration: none, {error.message}" + (f" ({error.fix})" if error.fix else ""))
        return runs
    was, is_ = found.recorded, found.foreseen
    print(f"calibration: {found.num_workers} workers, {was.num:,} contributions of the second half by the first half")
    print(f"  a second: {was.rate:,.3g} recorded, {is_.rate:,.3g} foreseen ({found.rate_error:+.1%})")
    print(f"  waiting: {share(was.wait_share)} recorded, {share(is_.wait_share)} foreseen")
    if was.num_sent and was.num_received:
        errors = found.bytes_errors
        print(f"  bytes sent: {was.num_sent:,} recorded, {is_.num_sent:,} foreseen ({errors[0]:+.3%})")
        print(f"  bytes received: {was.num_received:,} recorded, {is_.num_received:,} foreseen ({errors[1]:+.3%})")
    print(f"  staleness: distributions differ by at most {share(found.staleness_distance)}")
    chosen = []
    for config, world in runs:
        num = workers or found.num_workers
        world = fitted(found, replace(world, num_workers=num), told.has_links)
        chosen.append((config.model_copy(update={"run": config.run.model_copy(update={"workers": num})}), world))
    if far := found.outside(chosen[0][1]):
        print(f"  more than ten times away from what was recorded: {'; '.join(far)}")
    return chosen


def _compare(
    runs: list[Any], labels: list[str], learns: bool, has_baseline: bool, as_json: bool, report: str | None
) -> int:
    from ..common.reporting.log import setup_logging
    from ..common.reporting.pictures.progress import Steps
    from ..common.reporting.report import comparison_table, report_console
    from .results.summary import as_text, for_people, sentence, summary, time_cells, time_pictures, time_table
    from .run.simulation import Simulation

    setup_logging(runs[0][0].log.model_copy(update={"level": "warning"}), PROGRAM)
    gc.disable()  # a simulation makes millions of small things and no circles
    done: list[Any] = []
    is_over = False
    with Steps() as steps, interruptible() as is_interrupted:
        for number, ((config, world), label) in enumerate(zip(runs, labels, strict=True)):

            def looked(part: float, before: int = number, label: str = label) -> None:
                steps.at((before + part) / len(runs), f"simulating {label}")
                if is_interrupted():
                    raise KeyboardInterrupt

            learner = None
            if learns:
                from .learning.learner import Learner

                learner = Learner(config, world.num_workers)
            simulation = Simulation(config, world, time.perf_counter, learner=learner, looked=looked)
            try:
                simulation.go()
            except KeyboardInterrupt:
                is_over = True
                label = f"{label}, ended"
            if simulation.tally.num_steps:
                done.append((label, simulation))
            if is_over:
                break
    if is_over:
        print(f"{PROGRAM}: ended: {len(done)} of {len(runs)} runs, the last one not to its end", file=sys.stderr)
    if not done:
        return EXIT_INTERRUPTED
    first = done[0][1] if has_baseline else None
    found = [(label, summary(item, first)) for label, item in done]
    if report is not None:
        from ..common.reporting.compared import write_report

        notes = [f"{label}: events {item.tally.digest}" for label, item in done]
        write_report(report, "Simulated runs", found, notes, more=([time_cells(done)], time_pictures(done)))
    if as_json:
        print(as_text(done, first))
        return EXIT_INTERRUPTED if is_over else 0
    console = report_console()
    console.print(comparison_table(for_people(found)))
    console.print()
    console.print(time_table(done))
    if late := [label for label, item in done if not all(worker.incarnation for worker in item.workers)]:
        print(f"{', '.join(late)}: over before all workers of --join-at were to join")
    if learns:
        for label, told in found:
            print(f"\n{label}: loss over virtual time")
            for point in told.curve:
                print(f"  {point.elapsed_s:>12,.1f} s  step {point.step:>7,}  loss {point.metrics['loss']:.4f}")
    else:
        print("no loss simulated (--learn)")
    print(sentence(found))
    return EXIT_INTERRUPTED if is_over else 0


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within it Ctrl-C only is remembered, for who asks whether it came; a second one is an exception as ever."""
    told: list[int] = []

    def note(number: int, frame: object) -> None:
        if told:
            raise KeyboardInterrupt
        told.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(told)
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> None:
    """Entry point of `ps-sim`."""
    run_app(app, PROGRAM)
