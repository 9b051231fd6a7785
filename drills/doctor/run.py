"""What ps-launch doctor does: it measures, foresees, and tries."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.config.sources import load_config, of_mode
from ...common.errors import ParamServerError, UsageError
from ...common.reporting.summary import Summary
from ...launch.plan.hosts import load_hosts
from ...launch.plan.placement import place_servers, place_workers
from . import advice
from .measure import TINY_MB, Job, measure
from .results import as_json, show

_STEPS = 30


@dataclass(frozen=True)
class Request:
    """The flags."""

    config: str | None
    workers: int
    hosts: str | None
    megabytes: float | None  # None: the task's
    compute_s: float | None  # of a step; None: the task's, measured
    seconds: float  # of each measurement and worker
    lanes: tuple[str, ...]
    verify: bool
    as_json: bool
    sets: list[str]


def examine(wanted: Request) -> int:
    """Measure, print what was found, and return the exit code. Raises ParamServerError."""
    machines = ["--hosts", wanted.hosts, "--sync-code"] if wanted.hosts else []
    where = (*([wanted.config] if wanted.config else []), "-n", str(wanted.workers), *machines)
    sets, seconds = wanted.sets, wanted.seconds
    load_config(wanted.config, {}, sets, {}, is_worker=False)
    compute_s, megabytes = wanted.compute_s, wanted.megabytes
    if compute_s is None or megabytes is None:
        _say("a step of the task")
        found_s, found_mb = _step(where, seconds, sets)
        compute_s, megabytes = compute_s or found_s, megabytes or found_mb
    found = measure(Job((*where, *_sets("async", sets)), seconds, wanted.workers, _say), megabytes, wanted.lanes)
    if wanted.hosts:
        found.server = _server_of(wanted.hosts, wanted.workers, seconds, sets)
    links = advice.best_links(found)
    if not links:
        why = f": {found.refused[0][2]}" if found.refused else ""
        raise UsageError(f"no worker was given a lane of {','.join(wanted.lanes)}{why}", fix="leave --lanes out")
    link = advice.typical(links)
    trip_s = sorted(trip for trip, _ in found.round_trips.values())[len(found.round_trips) // 2]
    foreseen = advice.foresee(wanted.config, wanted.workers, megabytes, compute_s, link, trip_s, sets)
    checks = advice.checks(found)
    told = advice.sentences(foreseen, link, trip_s, compute_s, megabytes)
    over = f"worker.lanes={','.join(dict.fromkeys([*wanted.lanes, 'grpc']))}"
    beside = _verified(where, foreseen, seconds, wanted.workers, [*sets, over]) if wanted.verify else []
    if wanted.as_json:
        print(as_json(found, checks, foreseen, told, beside, compute_s))
    else:
        show(found, checks, foreseen, told, beside)
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
        found.append((one, workers / ran.step_s if ran.step_s else workers * ran.union_steps_per_s))
    return found
