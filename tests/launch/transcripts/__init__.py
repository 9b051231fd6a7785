"""Transcripts of the supervisor: `event -> decisions`, line by line, below the name of the case."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paramserver.launch.plan.hosts import SERVE, SERVER, Child
from paramserver.launch.supervise.restarts import Raised
from paramserver.launch.supervise.supervisor import Decision, Finish, Kill, Restart, Start, Supervisor, Terminate

_WHERE = "train.py, line 9"
# The longest reasons, in short.
_SHORTHAND = {
    r"; it had been started again (\w+)( times)?, as often as launch.max_restarts allows": r"; restarts spent: \1",
    r"; with --checkpoint-dir DIR it would have been started again": "; no snapshots",
    r"; the first to fail was (.*): killed by SIGKILL": r"; first: \1",
    r"; the same had ended it before it was started again": "; the same again",
}


def transcripts() -> dict[str, list[str]]:
    """Returns the lines of each case of all files by name: indented lines below an unindented one; # begins a comment.

    The lines of the case `first` begin all others of its file.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(Path(__file__).parent.glob("*.txt")):
        cases: dict[str, list[str]] = {}
        title = ""
        for line in path.read_text().splitlines():
            if line.startswith(" "):
                cases[title].append(line.strip())
            elif line and not line.startswith("#"):
                title = line
                cases[title] = []
        first = cases.pop("first", [])
        found |= {title: [*first, *lines] for title, lines in cases.items()}
    return found


def played(lines: list[str]) -> list[str]:
    """Returns what a supervisor decides, in the form of the transcript.

    A line `with NAME=VALUE ...` has its settings, `relays=A,B` regions of two workers.
    """
    settings: dict[str, Any] = dict(word.split("=") for word in lines[0].split()[1:])
    names = settings.pop("relays", "").split(",") if "relays" in settings else []
    relays = {Child("server", rank, name): range(2 * rank - 2, 2 * rank) for rank, name in enumerate(names, 1)}
    supervisor = Supervisor(**{name: json.loads(value) for name, value in settings.items()}, workers_of=relays)
    found = lines[:1]
    for line in lines[1:]:
        event = line.partition("->")[0]
        found.append(f"{event}-> {_text(_play(supervisor, event, relays))}".rstrip())
    return found


def _play(supervisor: Supervisor, event: str, relays: Mapping[Child, range]) -> list[Decision]:
    event, _, error = event.strip().partition(" raising ")
    event, _, at = event.partition(" at ")
    verb, *words = event.split()
    now = float(at or 0)
    match verb:
        case "begin":
            return supervisor.begin(now)
        case "listening":
            return supervisor.listening(_child(words or ["server"], relays), now) + supervisor.may_train(now)
        case "exit":
            text, _, where = error.removesuffix(")").partition(" (")
            raised = Raised(text, where or _WHERE) if text else None
            return supervisor.exited(_child(words[:-1], relays), int(words[-1]), now, raised)
        case "admitted":
            supervisor.admitted(Child("worker", int(words[0])))
            return []
        case "failed":
            return supervisor.run_failed(Child("worker", int(words[0])), int(words[1]), "no such metric", now)
        case "done":
            return supervisor.already_done("all is done", now)
        case "interrupt":
            return supervisor.interrupt(int(words[0]), now)
        case "tick":
            return supervisor.tick(now)
    raise AssertionError(event)


def _child(words: list[str], relays: Mapping[Child, range]) -> Child:
    """`server`, `serve`, `worker 0`, `shard 1` or `relay eu`."""
    known = {"server": SERVER, "serve": SERVE, **{str(relay): relay for relay in relays}}
    if (name := " ".join(words)) in known:
        return known[name]
    return Child(words[0].replace("shard", "server"), int(words[1]))


def _text(decisions: list[Decision]) -> str:
    """`end server, end worker 0 (why)`."""
    words = []
    for decision in decisions:
        match decision:
            case Restart(child, reason, in_s, number, of):
                end = f"; started again in {in_s:g} s (restart {number} of {of})"
                assert reason.startswith(f"{child} failed: ") and reason.endswith(end)
                words.append(f"await {child} for {in_s:g} s, restart {number} of {of}")
            case Finish(code):
                words.append(f"finish {code}")
            case _:
                verb = {Start: "start", Terminate: "end", Kill: "kill"}[type(decision)]
                words.append(f"{verb} {decision.child}")
    reasons = dict.fromkeys(_brief(decision.reason) for decision in decisions if not isinstance(decision, Restart))
    return ", ".join(words) + (f" ({'; '.join(reasons)})" if reasons else "")


def _brief(reason: str) -> str:
    for pattern, short in _SHORTHAND.items():
        reason = re.sub(pattern, short, reason)
    return reason
