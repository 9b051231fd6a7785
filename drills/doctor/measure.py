"""Runs `ps-launch` with the probe as each worker: once for each lane and way, and once for round trips."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...common.errors import ParamServerError, UsageError
from ...common.wire.json_text import read_json

PROBE = Path(__file__).with_name("probe.py")
LANES = ("shared", "direct", "grpc")
TINY_MB = 256 / 1e6
_MARK = "PROBE "
_STEPS = "100000000"  # the probe ends when its time is over
_NEVER = 1_000_000  # contributions until weights are fetched: only the way up is measured


@dataclass
class Link:
    """Between one worker's machine and the server over one lane. Seconds; bytes a second."""

    rank: int
    lane: str
    up: float
    down: float
    exchange_s: float  # of both ways, median
    together: float = 1.0  # so many times as long while all workers exchange

    def fields(self) -> dict[str, Any]:
        return {**vars(self), "up_mb_s": round(self.up / 1e6, 2), "down_mb_s": round(self.down / 1e6, 2)}


@dataclass
class Measured:
    """What was found."""

    megabytes: float
    machines: dict[int, dict[str, Any]] = field(default_factory=dict)  # by rank
    clocks: dict[int, float] = field(default_factory=dict)  # seconds behind this machine's, at most; by rank
    round_trips: dict[int, tuple[float, float]] = field(default_factory=dict)  # median and p99, by rank
    links: list[Link] = field(default_factory=list)
    refused: list[tuple[int, str, str]] = field(default_factory=list)  # rank, lane, and why it was not given
    server: dict[str, Any] = field(default_factory=dict)  # its machine, where no worker is on it
    security: str = "none"  # of the connections, as a server says it: `mutual TLS, token`

    def of_rank(self, rank: int) -> list[Link]:
        """The best lane first."""
        return sorted((link for link in self.links if link.rank == rank), key=lambda link: link.exchange_s)


@dataclass
class Given:
    """What a job's processes were given."""

    lanes: dict[int, str] = field(default_factory=dict)  # by rank
    reasons: dict[int, str] = field(default_factory=dict)  # why not one that is wanted more; by rank
    security: str = ""


@dataclass(frozen=True)
class Job:
    """How jobs are started: what `ps-launch` is told beside the probe's own."""

    arguments: tuple[str, ...]  # CONFIG, -n, --hosts, ...
    seconds: float  # for each worker and measurement
    num_workers: int
    say: Callable[[str], None]

    def probe(
        self, megabytes: float, lane: str, *sets: str, order: str = "in-turn"
    ) -> tuple[dict[int, dict[str, Any]], Given]:
        """What each rank's probe said, and what it was given. ParamServerError where a job fails."""
        settings = (
            "run.mode=async",
            "output.store=false",
            f"worker.lanes={lane if lane == 'grpc' else f'{lane},grpc'}",
            *sets,
        )
        command = [
            sys.executable, "-m", "paramserver.launch", *self.arguments, "--mode", "async", "--script", str(PROBE),
            "--log-format", "json", "--steps", _STEPS, *(f"--set={one}" for one in settings),
            "--max-restarts", "0", "--", f"{megabytes:.6f}", str(self.seconds), order,
        ]  # fmt: skip
        found: dict[int, dict[str, Any]] = {}
        given = Given()
        last: list[str] = []
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)
        assert process.stdout is not None
        for line in process.stdout:
            last = [*last[-8:], line.rstrip()]
            self._read(line, found, given)
        code = process.wait()
        if code or len(found) < self.num_workers:
            error = ParamServerError(
                f"the probe over {lane} ended with exit code {code}, and {len(found)} of {self.num_workers} workers "
                "said something:\n" + "\n".join(last)
            )
            error.exit_code = code or 1
            raise error
        return found, given

    def _read(self, line: str, found: dict[int, dict[str, Any]], given: Given) -> None:
        text = line
        if line.startswith("{"):
            try:
                event = read_json(line, nan=True)
            except ValueError:
                return
            match event.get("event"):
                case "admitted" | "resumed" if "tensors" in event:
                    given.lanes[event["rank"]] = event["tensors"]
                case "tensors" if event.get("reason") and "rank" in event:
                    given.reasons[event["rank"]] = event["reason"]
                case "listening":
                    given.security = str(event.get("security", ""))
            text = str(event.get("line", ""))
        at = text.find(_MARK)
        if at >= 0:
            said = read_json(text[at + len(_MARK) :])
            said["arrived"] = time.time()
            found[said["rank"]] = said


def measure(job: Job, megabytes: float, lanes: Sequence[str] = LANES) -> Measured:
    """Round trips, then each lane up and both ways. A lane that nobody was given is left out."""
    if megabytes <= 0:
        raise UsageError(f"the model has {megabytes:g} MB", fix="--mb 10")
    measured = Measured(megabytes)
    job.say("round trips")
    small, given = job.probe(TINY_MB, "direct")
    measured.security = given.security
    for rank, said in small.items():
        measured.machines[rank] = said
        measured.clocks[rank] = said["arrived"] - said["time"]
        measured.round_trips[rank] = said["median_s"], said["p99_s"]
    for lane in lanes:
        job.say(f"{megabytes:g} MB over {lane}")
        both, given = job.probe(megabytes, lane)
        wanted = {"shared": "shared memory"}.get(lane, lane)
        ranks = [rank for rank in both if given.lanes.get(rank, lane) == wanted]
        measured.refused += [(rank, lane, why) for rank, why in given.reasons.items() if rank not in ranks]
        if not ranks:
            continue
        up, _ = job.probe(megabytes, lane, f"policy.pull_every={_NEVER}")
        for rank in ranks:
            num, trip = both[rank]["bytes"], measured.round_trips[rank][0]
            up_s = max(0.05 * up[rank]["median_s"], up[rank]["median_s"] - trip)
            # Two medians: what is between them may be less than their noise, where weights come as fast as that.
            down_s = max(0.05 * both[rank]["median_s"], both[rank]["median_s"] - up[rank]["median_s"])
            measured.links.append(Link(rank, lane, num / up_s, num / down_s, both[rank]["median_s"]))
    if job.num_workers > 1:
        _together(job, measured)
    return measured


def _together(job: Job, measured: Measured) -> None:
    """How much longer an exchange takes while all exchange: the server's link, and its cores, are everybody's."""
    best = {rank: links[0] for rank in measured.machines if (links := measured.of_rank(rank))}
    for lane in sorted({link.lane for link in best.values()}):
        job.say(f"all workers at once over {lane}")
        both, _ = job.probe(measured.megabytes, lane, order="together")
        for rank, link in best.items():
            if link.lane == lane:
                link.together = max(1.0, both[rank]["median_s"] / link.exchange_s)
