"""Reads the history of a recorded run (`--history`), and replays it: the same events must lead to the same decisions.

Each line of the history is either a decision of the run or an event from outside. The replay compares decisions and
repeats events. It inserts events that the history lacks at places where their exact time makes no difference:

- A worker offers its model right before it enters or is back.
- If the next line is a decision without another event, a tick happened.

A history does not show that a run was stopped (session.stop(), run.stop_when), nor a mode's own state in a snapshot
(`Policy.saved_state`): a run in such a mode that resumed from a snapshot cannot be replayed.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from statistics import median
from typing import Any, NamedTuple

from ...common.config.schema import Config, PolicyConfig
from ...common.errors import UsageError
from ...common.registry import mode_anywhere
from ...common.tensors.judgement import SOUND, Judgement
from ...common.wire.records import Base, Contribution, ContributionId, Counts, FirstInfo, Timing
from ...drills.history_lines import Follower, Line, Problem, read_lines
from ...ps.core import effects, events
from ...ps.core.run import Run
from ...ps.core.state import Options
from ...ps.engine.modes import policy_of
from ...ps.observe.history import line_of
from ...ps.policies.base import Policy
from ..machines.world import World
from ..plan import changed
from ..run.simulation import Simulation
from ..traffic.sizes import Framing

# The compared fields of a line.
_DECIDED = {
    "join": ("rank", "incarnation", "seq"),
    "enter": ("rank", "incarnation", "seq"),
    "away": ("rank", "incarnation", "seq"),
    "back": ("rank", "incarnation", "seq"),
    "leave": ("rank", "incarnation", "how"),
    "accept": ("rank", "incarnation", "seq", "base_version", "version", "outcome"),
    "commit": ("version", "contributions", "members"),
    "reply": ("rank", "incarnation", "seq", "version", "outcome"),
    "control": ("do", "rank", "name", "value"),
}
_JUDGED = {"rejected": Judgement("reject", "recorded"), "skipped": Judgement("skip", "recorded")}


@dataclass
class Verdict:
    """The result of a replay. `problem`: the first decision that differs. Later decisions are not compared."""

    num_decisions: int = 0  # compared: outcomes of contributions, commits and replies
    problem: Problem | None = None
    decided: str = ""  # the decision now
    notes: list[str] = field(default_factory=list)  # information that the history lacks


def replay(lines: Iterable[Line], modes: Iterable[str] = ()) -> Verdict:
    """Replay the server's lines of one run, or of several. `modes`: modes in the user's files.

    Raises UsageError for an unknown mode.
    """
    of_server = dropwhile(lambda line: line.op != "start", (line for line in lines if line.role == "server"))
    return _Replay(list(of_server), modes).verdict


class _Replay(Follower):
    def __init__(self, lines: Sequence[Line], modes: Iterable[str]) -> None:
        super().__init__(modes)
        self.verdict = Verdict()
        self._lines, self._came = lines, 0  # position of the newest line from outside
        self._due: deque[tuple[str, dict[str, Any]]] = deque()  # lines that follow from what was applied
        self._run: Run
        for at, line in enumerate(lines):
            self._line = line
            if line.op == "start":
                self.feed(line)
            if line.op not in _DECIDED or line.fields.get("done") is False:
                continue
            if not self._due:
                self._came = at
                self.feed(line)
            op, fields = self._due.popleft() if self._due else ("", {})
            names = _DECIDED[line.op]
            if op != line.op or any(fields[name] != line[name] for name in names):
                recorded = ", ".join(f"{name} {line[name]}" for name in names)
                self.verdict.problem = Problem(line.file, line.number, f"recorded: {line.op} {recorded}")
                now = ", ".join(f"{name} {fields[name]}" for name in _DECIDED.get(op, ()))
                self.verdict.decided = f"{op} {now}" if op else "nothing"
                break
            self.verdict.num_decisions += line.op in ("accept", "commit", "reply")

    # ---- a run -------------------------------------------------------------------------------

    def _on_start(self, line: Line) -> None:
        mode = self._mode_of(line.fields)
        if mode is None:
            raise UsageError(
                f"{line.file}:{line.number}: mode {line['mode']} is not installed here",
                fix="name its file: --mode my_mode.py:Mine",
            )
        settings = {**line["common"], "num_workers": line.fields.get("workers")}
        options = Options(mode=mode, num_workers=settings["num_workers"], max_workers=1 << 20)
        policy = policy_of(mode, {**line["options"], **settings})
        run = self._run = Run(options, policy, line["run"], line["server_incarnation"])
        self._due.clear()
        if line.fields.get("source") is not None:
            if type(policy).saved_state is not Policy.saved_state:
                note = f"mode {mode} has state in snapshots that the history lacks: later decisions may differ"
                self.verdict.notes = list(dict.fromkeys([*self.verdict.notes, note]))
            saved = {"run": run.name, "server_incarnation": run.incarnation - 1, "policy": {}, "training": {}}
            saved |= {"rows": line.rows, "num_joins": dict.fromkeys(line.rows, 0)}
            run.restore(line["version"], ("model", "optimizer"), saved)

    def _apply(self, event: events.Event) -> None:
        event.at = self._line["t"]
        found = self._run.apply(event)
        for effect in found:
            if isinstance(effect, effects.Fact):
                op, fields = line_of(effect)
                if op in _DECIDED:
                    self._due.append((op, json.loads(json.dumps(fields))))
        for effect in found:
            if isinstance(effect, effects.AskForWeights):
                self._apply(events.Brought(effect.rank, effect.incarnation))

    # ---- events from outside: each is made from its line --------------------------------------

    def _on_join(self, line: Line) -> None:
        rank, incarnation = line["rank"], line["incarnation"]
        roster = self._run.roster
        if line.fields.get("resumed") and (known := roster.workers.get(rank)) is not None:
            before, process = known.incarnation, known.process
        else:
            is_next = roster.num_joins.get(rank, 0) + 1 == incarnation
            before, process = 0 if is_next else incarnation - 1, f"{rank}.{incarnation}"
            self._apply(events.HeartbeatBegan(process))
        this = self._run.incarnation
        self._apply(events.Joined(line.number, rank, "", before, this, process))

    def _on_enter(self, line: Line) -> None:
        """Workers that enter together have all offered: the first of them may have had to wait for the others."""
        for other in self._lines[self._came :]:
            if self._due or other.op == "start":
                break
            if other.op == "enter":
                self._offers(other["rank"])

    def _on_back(self, line: Line) -> None:
        self._offers(line["rank"])

    def _on_away(self, line: Line) -> None:
        self._apply(events.Disconnected(line["rank"], line["incarnation"]))

    def _on_leave(self, line: Line) -> None:
        rank, incarnation = line["rank"], line["incarnation"]
        match line["how"]:
            case "replaced":
                joins = (item for item in self._lines[self._came :] if item.op == "join" and item["rank"] == rank)
                if (join := next(joins, None)) is not None:
                    self._on_join(join)
            case "finished":
                self._apply(events.Finished(rank, incarnation))
            case how:
                self._apply(events.Left(rank, incarnation, how))

    def _on_control(self, line: Line) -> None:
        given = line.fields
        self._apply(events.Controlled(line["do"], given.get("rank"), given.get("name", ""), given.get("value")))

    def _on_accept(self, line: Line) -> None:
        rank, get = line["rank"], line.fields.get
        contribution = Contribution(
            ContributionId(rank, line["incarnation"], line["seq"]),
            self._run.policy.kind,
            Counts(get("samples", None) or 1, line["num_steps"], line["num_batches"], get("part", 0)),
            Base(line["base_version"]),
            Timing(get("compute_s", 0.0), get("transfer_s", 0.0)),
            first=FirstInfo(run_steps=get("run_steps", 0)),
        )
        self._apply(events.Contributed(contribution, _JUDGED.get(line["outcome"], SOUND)))

    def _on_commit(self, line: Line) -> None:
        self._apply(events.Ticked())

    _on_reply = _on_commit

    def _offers(self, rank: int) -> None:
        worker = self._run.roster.workers.get(rank)
        if worker is not None:
            self._apply(events.Offered(rank, worker.incarnation, model="model", optimizer="optimizer"))


def read_trace(path: str) -> list[Line]:
    """Returns the server's lines in order. Raises UsageError for a file that is not a history."""
    try:
        with open(path, "rb") as file:
            lines, problems = read_lines(path, file)
    except OSError as error:
        raise UsageError(f"flag --trace: {path} cannot be read: {error.strerror}", fix="a file of --history") from None
    if problems:
        raise UsageError(f"flag --trace: {problems[0]}", fix="ps-launch check shows all its problems")
    found = [line for line in lines if line.role == "server"]
    if not found or found[0].op != "start":
        message = "the server's lines do not begin with a start"
        raise UsageError(f"flag --trace: {path}: {message}", fix="give the file that ps-server wrote with --history")
    return found


def config_of(lines: Sequence[Line], config: Config) -> Config:
    """Returns `config` with the mode, the options and the length of the newest run in a history."""
    at = max(at for at, line in enumerate(lines) if line.op == "start")
    start = lines[at].fields
    common = start["common"]
    options = {name: common[name] for name in ("min_workers", "weighting", "delayed_update") if name in common}
    policy = PolicyConfig.model_validate({**config.policy.model_dump(), **options, **start["options"]})
    mode = next((name for name in config.run.modes if mode_anywhere(name) == start["mode"]), start["mode"])
    counted = [line for line in lines[at:] if line.op == "accept"]
    run_steps = next((line.fields["run_steps"] for line in counted if "run_steps" in line.fields), None)
    taken = max((line["training_steps"] for line in lines[at:] if line.op == "reply"), default=1)
    steps = common.get("training_steps") or run_steps or taken
    run = config.run.model_copy(update={"mode": mode, "steps": steps, "workers": start.get("workers")})
    return config.model_copy(update={"run": run, "policy": policy})


# ---- fit -----------------------------------------------------------------------------------------
# Fits computing and exchange of each rank on the first half of a recorded run, and predicts the second. Pure.
#
# The time from a reply to the rank's next contribution belongs to the worker, its links and the server. The time from
# a contribution to its reply belongs to the mode, which decides in the simulation too, so it is not fitted. The fit
# of a rank is a list of pairs: seconds of computing, and of the rest. The simulation takes them in the recorded
# order, so it repeats drift and moments that slow all workers. The fit leaves out the first tenth, in which processes
# warm up. If the user gives links, only the computing is fitted.


_FEWEST = 4  # contributions of a rank in the first half
_COUNTING = ("accepted", "skipped")


class Cycle(NamedTuple):
    """One contribution that counts. Seconds; `exchange_s`: neither computing nor waiting for the mode."""

    rank: int
    at: float
    compute_s: float
    exchange_s: float
    gate_wait_s: float
    staleness: int
    num_steps: int = 0  # training steps; 0: of a later part of a step
    number: int = 0  # of the rank
    num_sent: int = -1  # bytes of the contribution; -1: not recorded
    num_received: int = -1  # bytes of the reply to the contribution before


@dataclass(frozen=True)
class Half:
    """Measurements of some contributions: their rate per second, and the share of time spent waiting."""

    num: int
    rate: float
    wait_share: float
    staleness: tuple[int, ...]  # sorted
    num_sent: int = 0  # bytes, framing included; 0: not recorded
    num_received: int = 0


@dataclass(frozen=True)
class Calibration:
    """The accuracy of the prediction of the second half, which is `recorded`."""

    recorded: Half
    foreseen: Half
    world: World  # fitted
    exchange_s: float  # mean
    extra: tuple[float, float]  # bytes up and down of an exchange that the framing does not count, in the first half

    @property
    def rate_error(self) -> float:
        """The error of the rate, relative to the recorded rate."""
        return self.foreseen.rate / self.recorded.rate - 1

    @property
    def staleness_distance(self) -> float:
        """The Kolmogorov-Smirnov statistic: the largest difference of the distributions, 0..1."""
        item, other = self.recorded.staleness, self.foreseen.staleness
        return max(
            abs(bisect_right(item, x) / len(item) - bisect_right(other, x) / len(other)) for x in {*item, *other}
        )

    def outside(self, world: World) -> list[str]:
        """Returns the properties of a world that differ from the recording by more than ten times, as phrases."""
        found = []
        if _is_far(world.num_workers, self.world.num_workers):
            found.append(f"{world.num_workers:,} workers, {self.world.num_workers} recorded")
        own_s = world.sizes.up / world.up + world.sizes.down / world.down + world.latency_s
        own_s += world.sizes.up / world.server_up + world.sizes.down / world.server_down
        if own_s and self.exchange_s and _is_far(own_s, self.exchange_s):
            found.append(f"an exchange of {own_s:.3g} s, {self.exchange_s:.3g} s recorded")
        return found


def calibrate(lines: Iterable[Line], config: Config, framing: Framing | None = None) -> Calibration:
    """Fit a recorded run by the server's history. Raises UsageError if the history is incomplete.

    `config`: its mode, options and length. If `framing` is given, bytes are predicted too.
    """
    found = cycles((line.op, line["t"], line.fields) for line in lines if line.role == "server")
    middle = len(found) // 2
    if not any(cycle.compute_s for cycle in found):
        raise UsageError("the history has no computing times, because the run did not finish")
    if config.policy.delayed_update:
        raise UsageError(
            "policy.delayed_update: a history does not separate computing from the exchange meanwhile",
            fix="record a run without, and simulate with --set policy.delayed_update=true",
        )
    ranks = sorted({cycle.rank for cycle in found})
    pairs: dict[int, list[tuple[float, float]]] = {rank: [] for rank in ranks}
    most = max(cycle.num_steps for cycle in found) or 1
    for cycle in found[:middle]:  # as if all had equal steps: `Recorded` scales a contribution with fewer steps
        pairs[cycle.rank].append((cycle.compute_s * most / (cycle.num_steps or most), cycle.exchange_s))
    few = [rank for rank in ranks if len(pairs[rank]) < _FEWEST]
    if few or ranks != list(range(len(ranks))):
        which = few[0] if few else ranks[-1]
        raise UsageError(
            f"rank {which} has {len(pairs[which])} contributions in the first half of the history, but {_FEWEST} are "
            "needed of each rank from 0 on",
            fix="record a longer run of workers that all stay",
        )
    recorded = tuple(tuple(pairs[rank][-(-len(pairs[rank]) // 10) :]) for rank in ranks)
    world = World(num_workers=len(ranks), recorded=recorded, max_staged=1 << 20, framing=framing)
    again = _simulated(config, world)
    extra = _extra(found[:middle], again) if framing is not None else (0.0, 0.0)
    foreseen, num = measured(again[middle:], again[middle - 1].at), sum(item.num_sent >= 0 for item in again[middle:])
    sent, received = (round(num_bytes) * num for num_bytes in extra)
    return Calibration(
        measured(found[middle:], found[middle - 1].at),
        replace(foreseen, num_sent=foreseen.num_sent + sent, num_received=foreseen.num_received + received),
        world,
        sum(exchange_s for cycle in recorded for _, exchange_s in cycle) / sum(map(len, recorded)),
        extra,
    )


def _extra(recorded: Sequence[Cycle], again: Sequence[Cycle]) -> tuple[float, float]:
    """Returns the median bytes of a contribution and of a reply that the framing does not count."""
    counted = {(cycle.rank, cycle.number): cycle for cycle in again}
    known = [cycle for cycle in recorded if cycle.num_sent >= 0 and (cycle.rank, cycle.number) in counted]
    pairs = [(cycle, counted[cycle.rank, cycle.number]) for cycle in known]
    if not pairs:
        return 0.0, 0.0
    up = median(item.num_sent - other.num_sent for item, other in pairs)
    return up, median(item.num_received - other.num_received for item, other in pairs)


def _simulated(config: Config, world: World) -> list[Cycle]:
    lines: list[tuple[str, float, dict[str, Any]]] = []

    def observe(at: float, fact: effects.Fact) -> None:
        op, fields = line_of(fact)
        lines.append((op, at, fields))

    Simulation(changed(config, run={"workers": world.num_workers}), world, observe=observe).go()
    return cycles(lines)


def fitted(calibration: Calibration, world: World, has_links: bool) -> World:
    """Returns `world` with the recorded computing; unless the user gave links (`has_links`), also with the recorded
    exchanges, and nothing else that takes time."""
    pairs, framing = calibration.world.recorded, world.framing
    if framing is not None:
        world = replace(world, framing=replace(framing, extra=calibration.extra))
    if has_links:
        return replace(world, recorded=tuple(tuple((compute_s, 0.0) for compute_s, _ in pair) for pair in pairs))
    return World(
        num_workers=world.num_workers, seed=world.seed, max_staged=1 << 20, recorded=pairs, sizes=world.sizes,
        framing=world.framing,
    )  # fmt: skip


def cycles(lines: Iterable[tuple[str, float, dict[str, Any]]]) -> list[Cycle]:
    """Of (operation, time, fields) of a history, in the order in which contributions were replied, ranks from their
    first reply on."""
    free_at: dict[int, float] = {}  # by rank: when it could go on
    open_: dict[int, Cycle] = {}  # by rank: came, and is not replied
    found: list[Cycle] = []
    counted: dict[int, Sequence[int]] = {}  # bytes by rank, with its newest contribution
    for op, at, fields in lines:
        if op == "start" and "mode" in fields:
            free_at, open_, found, counted = {}, {}, [], {}  # the newest run of the file
        elif op == "accept" and fields["outcome"] in _COUNTING and (rank := fields["rank"]) in free_at:
            compute_s = fields.get("compute_s", 0.0)
            exchange_s = max(0.0, at - free_at[rank] - compute_s)
            staleness = fields["version"] - fields["base_version"]
            before, now = counted.get(rank, ()), fields.get("bytes", ())
            sent, received = (now[0] - before[0], now[1] - before[1]) if before and now else (-1, -1)
            open_[rank] = Cycle(
                rank, at, compute_s, exchange_s, 0.0, staleness, fields["num_steps"], fields["seq"], sent, received
            )
            counted[rank] = now
        elif op == "reply":
            rank = fields["rank"]
            free_at[rank] = at
            if rank in open_:
                cycle = open_.pop(rank)
                found.append(cycle._replace(gate_wait_s=at - cycle.at))
        elif op in ("leave", "join"):
            free_at.pop(fields["rank"], None)
            open_.pop(fields["rank"], None)
    return sorted(found, key=lambda cycle: cycle.at)


def measured(found: Sequence[Cycle], since: float) -> Half:
    """Of contributions after the moment `since`."""
    elapsed_s = found[-1].at - since if found else 0.0
    gate_wait_s = sum(cycle.gate_wait_s for cycle in found)
    total_s = gate_wait_s + sum(cycle.compute_s + cycle.exchange_s for cycle in found)
    return Half(
        len(found),
        len(found) / elapsed_s if elapsed_s else 0.0,
        gate_wait_s / total_s if total_s else 0.0,
        tuple(sorted(cycle.staleness for cycle in found)),
        sum(max(0, cycle.num_sent) for cycle in found),
        sum(max(0, cycle.num_received) for cycle in found),
    )


def _is_far(value: float, other: float) -> bool:
    return not 0.1 <= value / other <= 10
