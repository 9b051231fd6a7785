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
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Any

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
