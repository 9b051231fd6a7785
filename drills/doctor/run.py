"""The work of ps-launch doctor: it measures, predicts, and verifies."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ...common.config.sources import load_config, of_mode
from ...common.errors import EXIT_INTERRUPTED, ParamServerError, UsageError
from ...common.reporting.pictures.progress import Steps
from ...common.reporting.report import report_console, share, size
from ...common.reporting.summary import Summary
from ...launch.plan.hosts import load_hosts, place_servers, place_workers
from . import advice
from .measure import TINY_MB, Measured, Plan, measure, probe_messages, task_of

# ---- results -------------------------------------------------------------------------------------
# The results of ps-launch doctor, as tables and as JSON.


@dataclass(frozen=True)
class Report:
    """All results of the doctor."""

    measured: Measured
    checks: list[advice.Finding]
    foreseen: list[advice.Foreseen]
    sentences: list[str]
    verified: list[tuple[advice.Foreseen, float]]  # with the measured steps a second

    def as_json(self) -> str:
        """Returns everything as JSON."""
        found = {name: value for name, value in vars(self.measured).items() if name not in ("clocks", "refused")}
        trips = {rank: {"median_s": trip, "p99_s": worst} for rank, (trip, worst) in self.measured.round_trips.items()}
        found |= {
            "clocks_s": self.measured.clocks, "round_trips": trips,
            "links": [
                {**vars(link), "up_mb_s": round(link.up / 1e6, 2), "down_mb_s": round(link.down / 1e6, 2)}
                for link in self.measured.links
            ],
            "checks": [asdict(item) for item in self.checks],
            "foreseen": [asdict(item) for item in self.foreseen], "advice": self.sentences,
            "verified": [
                {"mode": item.mode, "codec": item.codec, "foreseen": item.steps_per_s, "measured": rate}
                for item, rate in self.verified
            ],
        }  # fmt: skip
        return json.dumps(found, indent=2)

    def show(self) -> None:
        """Print tables and sentences."""
        found = self.measured
        console = report_console()
        columns = ("up MB/s", "down MB/s", "exchange", "while all exchange", "round trip", "slowest 1 %")
        links = Table("worker", "host", "transport", *columns, box=None)
        for link in sorted(found.links, key=lambda link: (link.rank, link.exchange_s)):
            trip, worst = found.round_trips[link.rank]
            links.add_row(
                str(link.rank), str(found.machines[link.rank]["host"]), link.transport, f"{link.up / 1e6:,.1f}",
                f"{link.down / 1e6:,.1f}", f"{link.exchange_s * 1e3:,.1f} ms",
                f"{link.together:.1f} times as long" if link.together > 1 else "",
                f"{trip * 1e3:.2f} ms", f"{worst * 1e3:.2f} ms",
            )  # fmt: skip
        console.print(links)
        console.print(machines_table(found))
        for check in self.checks:
            style = {"ok": "green", "warn": "yellow", "fail": "red"}[check.level]
            console.print(f"{check.level}: {check.text}" + (f"; {check.fix}" if check.fix else ""), style=style)
        console.print(f"Measured {found.ended}.", style="dim", highlight=False)
        console.print("Steps per second of all workers, by codec, and the share of time in which workers compute:")
        modes = Table("mode", "local steps", *advice.CODECS, box=None)
        for mode in dict.fromkeys(item.mode for item in self.foreseen):
            row = {item.codec: item for item in self.foreseen if item.mode == mode}
            local = "/".join(dict.fromkeys(str(item.local_steps) for item in row.values()))
            cells = [
                f"{row[codec].steps_per_s:,.1f} ({share(row[codec].of_ideal)})" if codec in row else "-"
                for codec in advice.CODECS
            ]
            modes.add_row(mode, local, *cells)
        console.print(modes)
        if self.verified:
            real = Table("mode", "codec", "foreseen", "measured", "error", box=None)
            for entry, rate in self.verified:
                error = f"{entry.steps_per_s / rate - 1:+.0%}" if rate else "-"
                real.add_row(entry.mode, entry.codec, f"{entry.steps_per_s:,.1f}", f"{rate:,.1f}", error)
            console.print(real)
        for sentence in self.sentences:
            console.print(sentence, highlight=False)


def machines_table(found: Measured) -> Table:
    """Returns the table of all machines, including machines without problems."""
    free = ("memory free", "disk free", "shared memory free")
    names = ("clock differs by", "cores", "load", *free, "to write 1 MiB", "open files", "GPUs", "security")
    table = Table("machine", *names, box=None)
    for name, entry, behind_s in found.named_machines():
        written = f"{entry['fsync_s'] * 1e3:.1f} ms" if entry["fsync_s"] >= 0 else "no"
        table.add_row(
            name, "-" if behind_s is None else f"{behind_s:+.2f} s", str(entry["cores"]),
            f"{entry['load']:.1f}", *(size(entry[f"free_{name}"]) for name in ("memory", "disk", "shm")), written,
            f"{entry['files']:,}", str(entry["cuda"]), found.security,
        )  # fmt: skip
    return table


# ---- run -----------------------------------------------------------------------------------------

PROGRAM = "ps-launch doctor"
_MEASURING = 0.9  # of the progress bar; the simulation is the rest
_SERVER_S = 30.0

_Verified = tuple[advice.Foreseen, float]  # and the measured steps a second


def examine(
    path: str | None, hosts: str | None, sets: list[str], *, num_workers: int, megabytes: float | None,
    compute_s: float | None, seconds: float, transports: tuple[str, ...], budget_s: float, verify: bool, as_json: bool,
) -> int:  # fmt: skip
    """Measure, print the results, and return the exit code. Raises ParamServerError.

    `path`: CONFIG. `megabytes` of the model and `compute_s` of a step are the task's if they are None. `seconds`: of
    each turn. `budget_s`: for measuring.
    """
    where = (*([path] if path else []), "-n", str(num_workers), *(["--hosts", hosts, "--sync-code"] if hosts else []))
    config = load_config(path, {}, sets, {}, is_worker=False).config
    needs_task = compute_s is None or megabytes is None
    plan = Plan(seconds, megabytes, transports, task_of(config) if needs_task else None)
    messages = probe_messages((*where, *_sets("async", sets)), plan)
    threading.Thread(target=advice.load_codecs, daemon=True).start()  # while the job starts
    with Steps() as steps:
        found = measure(messages, num_workers, plan, budget_s, lambda part, text: steps.at(_MEASURING * part, text))
        if not found.links and found.is_partial:
            print(f"{PROGRAM}: ended before anything was measured", file=sys.stderr)
            return EXIT_INTERRUPTED
        if not found.links:
            why = f": {found.refused[0][2]}" if found.refused else ""
            message = f"no worker has a transport of {','.join(transports)}{why}"
            raise UsageError(message, fix="leave --transports out")
        if hosts and not found.is_partial:
            steps.at(_MEASURING, "measuring the server's machine")
            found.server = server_of(hosts, num_workers, seconds, sets)
        found.compute_s = compute_s or found.compute_s
        link = advice.typical(found.best_links())
        trip_s = sorted(trip for trip, _ in found.round_trips.values())[len(found.round_trips) // 2]
        steps.at(_MEASURING, "simulating each mode with these metrics")
        foreseen = advice.foresee(path, num_workers, found.megabytes, found.compute_s, link, trip_s, sets)
    checks = advice.checks(found)
    uneven = advice.are_uneven(found)
    sentences = advice.sentences(foreseen, link, trip_s, found.compute_s, found.megabytes, uneven=uneven)
    over = f"worker.transports={','.join(dict.fromkeys([*transports, 'grpc']))}"
    verified: list[_Verified] = []
    if verify and not found.is_partial:
        with Steps() as steps:
            try:
                verified.extend(_verified(where, foreseen, seconds, num_workers, [*sets, over], steps))
            except KeyboardInterrupt:
                found.is_partial = True
    report = Report(found, checks, foreseen, sentences, verified)
    if as_json:
        print(report.as_json())
    else:
        report.show()
    if found.is_partial:
        return EXIT_INTERRUPTED
    return 1 if any(check.level == "fail" for check in checks) else 0


def server_of(hosts: str, num_workers: int, seconds: float, sets: list[str]) -> dict[str, Any]:
    """Measure the server's machine, which keeps snapshots and optimizer state; empty where a worker runs on it."""
    known = load_hosts(hosts)
    host = place_servers(known, 1)[0]
    if host.host in {host.host for host in place_workers(known, num_workers)}:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hosts.yaml"
        alone = {**host.model_dump(mode="json", exclude_defaults=True), "slots": 1}
        path.write_text(json.dumps({"hosts": [alone]}))  # JSON is YAML
        where = ("-n", "1", "--hosts", str(path), "--sync-code", *_sets("async", sets))
        plan = Plan(seconds, TINY_MB, ("direct",), rounds=1)
        return measure(probe_messages(where, plan), 1, plan, _SERVER_S, lambda *_: None).machines[0]


def _sets(mode: str, sets: list[str]) -> list[str]:
    """Returns the settings as flags, without those of other modes."""
    return [f"--set={item}" for item in of_mode(mode, {}, sets)[1]]


def _ran(where: tuple[str, ...], mode: str, steps: int, sets: list[str]) -> Summary:
    """Returns the summary of a short run. Raises ParamServerError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "summary.json"
        nothing = ("output.save", "output.history", "checkpoint.dir", "run.eval_every")
        quiet = ["output.store=false", *(f"{key}=null" for key in nothing), *sets]
        command = [
            sys.executable, "-m", "paramserver.launch", *where, "--mode", mode, "--steps", str(steps), "--summary",
            str(path), *_sets(mode, quiet),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not path.exists():
            last = "\n".join((done.stderr or done.stdout).splitlines()[-8:])
            message = f"a run of {steps} steps in {mode} ended with exit code {done.returncode}:\n{last}"
            error = ParamServerError(message)
            error.exit_code = done.returncode or 1
            raise error
        return Summary.model_validate_json(path.read_text())


def _verified(
    where: tuple[str, ...], foreseen: list[advice.Foreseen], seconds: float, workers: int, sets: list[str], steps: Steps
) -> Iterator[_Verified]:
    """Yields the measured steps a second of every mode with raw and of the first mode with every codec.

    Each is a real run of about `seconds`, with at least three rounds.
    """
    chosen = [item for item in foreseen if item.codec == advice.CODECS[0] or item.mode == advice.MODES[0]]
    for number, entry in enumerate(chosen):
        steps.at(number / len(chosen), f"run {number + 1} of {len(chosen)}: {entry.mode}, {entry.codec}")
        rounds = max(3, round(seconds * entry.steps_per_s / workers / entry.local_steps))
        ran = _ran(
            where, entry.mode, rounds * entry.local_steps,
            [*sets, *entry.sets, f"policy.local_steps={entry.local_steps}"],
        )  # fmt: skip
        yield entry, workers / ran.step_s if ran.step_s else workers * ran.union_steps_per_s
