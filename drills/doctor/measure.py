"""Runs `ps-launch` once, with the probe as each worker, and reads its measurements until rounds of them agree.

A pipeline is measured separately, at the end of this file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from ...common.config.schema import Config
from ...common.config.sources import load_config
from ...common.errors import ParamServerError, UsageError
from ...common.wire.json_text import read_json

PROBE = Path(__file__).with_name("probe.py")
TRANSPORTS = ("shared", "direct", "grpc")
TINY_MB = 256 / 1e6
_MARK = "PROBE "
_STEPS = "100000000"  # the doctor ends the probe
_PULL_EVERY = 2  # contributions: one upload alone, then one exchange in both directions
_MAX_ROUNDS = 1_000
_END_S = 10.0  # time for a launcher to end its processes
_JOIN_S = 300.0  # limit for a probe to send its model: a busy machine loads torch for more than the default of 30 s
_LAST, _TOLERANCE = 3, 0.05  # rounds that must agree, and how closely


@dataclass
class Link:
    """One worker's machine and the server, over one transport. Seconds; bytes a second."""

    rank: int
    transport: str
    up: float
    down: float
    exchange_s: float  # both ways, median
    together: float = 1.0  # factor on exchange_s while all workers exchange


@dataclass
class Measured:
    """All measurements."""

    megabytes: float
    machines: dict[int, dict[str, Any]] = field(default_factory=dict)  # by rank
    clocks: dict[int, float] = field(default_factory=dict)  # seconds behind this machine, an upper bound; by rank
    round_trips: dict[int, tuple[float, float]] = field(default_factory=dict)  # median and p99, by rank
    links: list[Link] = field(default_factory=list)  # by rank
    refused: list[tuple[int, str, str]] = field(default_factory=list)  # rank, transport and reason
    server: dict[str, Any] = field(default_factory=dict)  # its machine, if no worker runs there
    security: str = "none"  # of the connections, as in the server's log: `mutual TLS, token`
    compute_s: float = 0.0  # of a training step of the task; 0: not measured
    ended: str = ""  # why measuring ended, a sentence
    is_partial: bool = False  # ended by Ctrl-C

    def best_links(self) -> list[Link]:
        """Returns the link of each worker over its best transport."""
        of_ranks = groupby(self.links, key=lambda link: link.rank)
        return [min(links, key=lambda link: link.exchange_s) for _, links in of_ranks]

    def named_machines(self) -> list[tuple[str, dict[str, Any], float | None]]:
        """Returns each machine with its name, and the seconds that its clock is behind; None: not known."""
        found = [
            (f"worker {rank} ({item['host']})", item, self.clocks.get(rank))
            for rank, item in sorted(self.machines.items())
        ]
        if item := self.server:
            found.append((f"server ({item['host']})", item, item["arrived"] - item["time"]))
        return found


@dataclass(frozen=True)
class Plan:
    """What a probe measures."""

    seconds: float  # of a turn of each worker and transport
    megabytes: float | None  # of the model; None: the task's
    transports: tuple[str, ...]
    task: dict[str, Any] | None = None  # name, args, batch_size, accumulate, precision; None: its step is not measured
    rounds: int = _MAX_ROUNDS


def task_of(config: Config) -> dict[str, Any]:
    """Returns the settings with which a probe takes steps of the task."""
    return {
        "name": config.task.name, "args": config.task.args, "batch_size": config.run.batch_size,
        "accumulate": config.train.accumulate, "precision": config.train.precision,
    }  # fmt: skip


def probe_messages(arguments: Sequence[str], plan: Plan) -> Generator[dict[str, Any]]:
    """Runs a job of probes with these arguments of ps-launch (CONFIG, -n, --hosts, ...), and yields their messages.

    Also yields the security of the connections, from the server's log. The job ends with the iterator. Raises
    ParamServerError.
    """
    settings = (
        "run.mode=async", "output.store=false", f"policy.pull_every={_PULL_EVERY}",
        f"server.join_timeout_s={_JOIN_S}",
    )  # fmt: skip
    command = [
        sys.executable, "-m", "paramserver.launch", *arguments, "--mode", "async", "--script", str(PROBE),
        "--log-format", "json", "--steps", _STEPS, *(f"--set={setting}" for setting in settings),
        "--max-restarts", "0", "--", json.dumps(asdict(plan)),
    ]  # fmt: skip
    last: list[str] = []
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, start_new_session=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            last = [*last[-8:], line.rstrip()]
            if (message := _read(line)) is not None:
                yield message
        if code := process.wait():
            error = ParamServerError(f"the measuring run ended with exit code {code}:\n" + "\n".join(last))
            error.exit_code = code
            raise error
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End the launcher, which ends its processes. Their further output is not read."""
    assert process.stdout is not None
    process.stdout.close()
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its processes end with it
            process.wait()


def _read(line: str) -> dict[str, Any] | None:
    """Returns the message in a line of the job's output; None for other lines."""
    text = line
    if line.startswith("{"):
        try:
            event = read_json(line, nan=True)
        except ValueError:
            return None
        if event.get("event") == "listening":
            return {"kind": "security", "security": str(event.get("security", ""))}
        text = str(event.get("line", ""))
    _, mark, message = text.partition(_MARK)
    return {**read_json(message), "arrived": time.time()} if mark else None


class Measurements:
    """Collects the probes' messages, and decides when they are enough. `max_s`: time limit."""

    def __init__(self, num_workers: int, began_at: float, max_s: float) -> None:
        self._num_workers, self._until, self._max_s = num_workers, began_at + max_s, max_s
        self._security = ""
        self._machines: dict[int, dict[str, Any]] = {}
        self._turns: dict[tuple[int, str], list[dict[str, Any]]] = {}  # by rank and transport
        self._together: dict[int, list[dict[str, Any]]] = {}
        self._refused: dict[tuple[int, str], str] = {}
        # The rounds that all workers have finished: seconds of an exchange, by worker and transport.
        self.rounds: list[dict[tuple[int, str], float]] = []

    def add(self, message: dict[str, Any]) -> None:
        """Add a message of a probe, or the security of the connections."""
        match message:
            case {"kind": "security"}:
                self._security = message["security"]
            case {"kind": "machine", "rank": rank}:
                self._machines[rank] = message
            case {"kind": "transport", "rank": rank, "transport": transport} if message["given"] == transport:
                self._turns.setdefault((rank, transport), []).append(message)
            case {"kind": "transport", "rank": rank, "transport": transport}:
                self._refused[rank, transport] = message["reason"]
            case {"kind": "together", "rank": rank}:
                self._together.setdefault(rank, []).append(message)
                number = len(self.rounds)
                if sum(len(found) > number for found in self._together.values()) == self._num_workers:
                    finished = {key: found for key, found in self._turns.items() if len(found) > number}
                    self.rounds.append({key: found[number]["both_s"] for key, found in finished.items()})

    def best(self) -> set[tuple[int, str]]:
        """Returns each worker with its best transport, by the medians so far. The advice needs no other one."""
        medians = {key: median(turn["both_s"] for turn in turns) for key, turns in self._turns.items()}
        ranks = {rank for rank, _ in medians}
        return {min((key for key in medians if key[0] == rank), key=medians.__getitem__) for rank in ranks}

    @property
    def measured(self) -> Measured:
        """Returns medians over all rounds, including an incomplete round."""
        first = next(iter(self._machines.values()), {})
        found = Measured(first.get("bytes", 0) / 1e6, dict(sorted(self._machines.items())), security=self._security)
        found.compute_s = median([machine["compute_s"] or 0.0 for machine in self._machines.values()] or [0.0])
        found.clocks = {rank: machine["arrived"] - machine["time"] for rank, machine in found.machines.items()}
        found.refused = [(rank, transport, why) for (rank, transport), why in sorted(self._refused.items())]
        for rank in found.machines:
            if turns := [turn for (of, _), its in self._turns.items() if of == rank for turn in its]:
                worst_s = max(turn["trip_p99_s"] for turn in turns)
                found.round_trips[rank] = median(turn["trip_s"] for turn in turns), worst_s
        found.links = [self._link(*key, turns, found) for key, turns in sorted(self._turns.items())]
        return found

    def _link(self, rank: int, transport: str, turns: list[dict[str, Any]], found: Measured) -> Link:
        up_s, both_s = median(turn["up_s"] for turn in turns), median(turn["both_s"] for turn in turns)
        num_bytes, trip_s = found.machines[rank]["bytes"], found.round_trips[rank][0]
        # If downloads are fast, the difference of two medians may be below their noise.
        down_s = max(0.05 * both_s, both_s - up_s)
        link = Link(rank, transport, num_bytes / max(0.05 * up_s, up_s - trip_s), num_bytes / down_s, both_s)
        together = [turn["pair_s"] for turn in self._together.get(rank, []) if turn["transport"] == transport]
        if together and self._num_workers > 1:
            link.together = max(1.0, median(together) / (up_s + both_s))
        return link

    def differ_by(self) -> float:
        """Returns the smaller spread: of the last three rounds, or of the running medians after each of them.

        It is the largest relative spread of the workers' best transports; inf for fewer rounds.
        """
        if len(self.rounds) < _LAST:
            return float("inf")
        best = self.best()
        chosen = best & self.rounds[-1].keys()
        if best and not chosen:
            return float("inf")
        medians = [
            {key: median(item[key] for item in self.rounds[:end] if key in item) for key in chosen}
            for end in range(len(self.rounds) - _LAST + 1, len(self.rounds) + 1)
        ]
        last = [{key: item[key] for key in chosen if key in item} for item in self.rounds[-_LAST:]]
        return min(_spread(last), _spread(medians))

    def why_stop(self, now: float) -> str:
        """Returns the reason to stop as a sentence, empty to continue. The first round is always complete."""
        if not self.rounds:
            return ""
        num = len(self.rounds)
        rounds = f"{num} round{'s' if num > 1 else ''}"
        differ = self.differ_by()
        if differ <= _TOLERANCE:
            return f"{rounds}; the metrics of the last {_LAST} agree within {_TOLERANCE:.0%}"
        if now >= self._until:
            message = f", which differ by up to {differ:.0%}" if num >= _LAST else ""
            return f"{rounds}{message}: the {self._max_s:g} s of --budget were used up"
        return ""

    def part_done(self, now: float) -> float:
        """Returns the part of the time limit that is over, 0..1."""
        return min(1.0, 1.0 - (self._until - now) / self._max_s)


def measure(
    messages: Generator[dict[str, Any]], num_workers: int, plan: Plan, max_s: float, show: Callable[[float, str], None],
    clock: Callable[[], float] = time.monotonic,
) -> Measured:  # fmt: skip
    """Measure round by round, until rounds agree, `max_s` are over, or Ctrl-C.

    `messages`: of the probes (`probe_messages`). `show` gets the finished part (0..1) and the next activity. Transports
    that no worker has are left out.
    """
    if plan.megabytes is not None and plan.megabytes <= 0:
        raise UsageError(f"the model has {plan.megabytes:g} MB", fix="--mb 10")
    found, why, is_partial = Measurements(num_workers, clock(), max_s), "", False
    try:
        show(0.0, "starting a server and the workers" + (", which take some steps of the task" if plan.task else ""))
        with closing(messages):
            for message in messages:
                found.add(message)
                if message["kind"] == "security":
                    continue
                num = len(found.rounds)
                if why := found.why_stop(clock()) or (f"{num} round" if num >= plan.rounds else ""):
                    break
                show(found.part_done(clock()), f"measuring {', '.join(plan.transports)}: round {num + 1}")
    except KeyboardInterrupt:
        num, is_partial = len(found.rounds), True
        why = f"{num} whole round{'' if num == 1 else 's'}, then Ctrl-C"
    measured = found.measured
    measured.ended, measured.is_partial = why, is_partial
    return measured


def _spread(rounds: Sequence[Mapping[tuple[int, str], float]]) -> float:
    """Returns the largest relative difference of a measurement in three rounds."""
    spreads = []
    for name in set(rounds[0]).intersection(*rounds):
        low, middle, high = sorted(item[name] for item in rounds)
        spreads.append((high - low) / middle if middle else 0.0)
    return max(spreads, default=0.0)


# ---- pipeline ------------------------------------------------------------------------------------
# Measures whether a pipeline speeds up a task's model: its layers, the link, the cut, and the time of a step.


_GROUP = "paramserver.worker.replica_group"


def examine_pipeline(path: str | None, sets: list[str], as_json: bool) -> int:
    """Measure with as many processes as a worker has (launch.group), print, and return the exit code.

    Raises UsageError.
    """
    config = load_config(path, {}, sets, {}, is_worker=False).config
    if config.launch.group < 2:
        message = "flag --pipeline: launch.group is 1, but a pipeline needs several processes in a worker"
        raise UsageError(message, fix="--set launch.group=2")
    plan = {"task": task_of(config), "worker": config.worker.model_dump(mode="json")}
    script = str(Path(__file__).with_name("stages.py"))
    command = [sys.executable, "-m", _GROUP, str(config.launch.group), script, json.dumps(plan)]
    threads = config.worker.threads or max(1, (os.cpu_count() or 1) // config.launch.group)
    environ = {"OMP_NUM_THREADS": str(threads), **os.environ}  # as the launcher divides the cores
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environ)
    lines = [line.removeprefix("STAGES ") for line in done.stdout.splitlines() if line.startswith("STAGES ")]
    if done.returncode or not lines:
        return done.returncode or 1
    found = read_json(lines[0])
    print(lines[0] if as_json else "\n".join(sentences(found)))
    return 0


def sentences(found: dict[str, Any]) -> list[str]:
    """Returns the results of the measurement as sentences."""
    times = " + ".join(f"{1000 * item:.1f}" for item in found["stage_s"])
    mb, counts = found["border_bytes"] / 1e6, " + ".join(map(str, found["counts"]))
    schedule = f"With {found['microbatches']} microbatches and {found['schedule']}"
    # M + S - 1 turns of the slowest stage. A turn takes at least as long as one message in each direction.
    turn_s = max(max(found["stage_s"]), 2 * found["link_s"])
    expected = (found["microbatches"] + (len(found["stage_s"]) - 1) * (found["bubble"] > 0)) * turn_s
    alone, measured = found["alone_s"], found["measured_s"]
    lines = [
        f"The layers are cut into {counts}; a microbatch takes {times} ms in the stages.",
        f"Between two stages a microbatch sends {mb:.2f} MB in each direction, in {1000 * found['link_s']:.1f} ms.",
        f"{schedule} a process waits {found['bubble']:.0%} of a step (the bubble); more microbatches make it smaller.",
        f"A step should take {1000 * expected:.0f} ms; measured here: {1000 * measured:.0f} ms, and "
        f"{1000 * alone:.0f} ms in one process.",
    ]
    if min(expected, measured) > alone:
        lines.append("A pipeline is slower than one process here: use it only if the model is too large for one.")
    return lines
