"""The words of the transcripts in run/ and shards/: a line's left side is an event, its right side effects.

    mode sync                     which policy
    option num_workers 2          of `Run.Options`, of the policy, or of both
    restored v4 w0:4 w1:4         the run goes on from a snapshot, before anything else

    join w0                       a new process asks for rank 0; `join` for any rank
    join w0 again                 the same process on a new stream, with the incarnation it was told last
    join w0 again as 1            the same, but it has not heard of a newer incarnation than 1
    offer w0 [model M] [optimizer O]      it has said what it trains
    enter w0                      join, heartbeat and offer: how every worker begins
    resume w0                     join again, and offer
    bring w0                      the initial weights it was asked for
    contribute w0 s3 [on v2] [x64] [lr 0.5] [nan|skip|halt|clip]
    repeat w0 s3                  it asks again for the reply to its contribution 3
    disconnect w0, leave w0, expel w0, finish w0, stop w0, failed w0
    heartbeat w0, heartbeat w0 stops, heard w0
    stored 1 v3                   snapshot attempt 1 is over; version 3 is the newest on the disk
    after 2.5 s                   time passes, and is looked at
    stop, fail                    the server stops; something outside went wrong

`w0.2` is rank 0 as incarnation 2, where `w0` is the newest there is. `w0#3` is its contribution 3.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from paramserver.common.kinds import ContributionKind
from paramserver.common.tensors.judgement import SOUND, Judgement
from paramserver.common.wire.records import ContributionId, Row
from paramserver.ps.core import effects, events
from paramserver.ps.core.run import Run
from paramserver.ps.core.state import Options
from paramserver.ps.engine.modes import policy_of

from ..records import contributed

_JUDGEMENTS = {
    "nan": Judgement("reject", "NaN or Inf", "limit"),
    "skip": Judgement("skip", "NaN or Inf", "limit"),
    "halt": Judgement("halt", "NaN or Inf", "limit"),
    "clip": Judgement("take", "norm", "limit", is_clipped=True, scale=0.5),
}
_WORKER = re.compile(r"w(\d+)(?:\.(\d+))?")
_CONTRIBUTED = re.compile(
    r"s(\d+)(?: on v(\d+))?(?: x(\d+))?(?: lr ([\d.]+))?(?: (nan|skip|halt|clip))?( mean)?(?: part (\d))?"
)


def make_run(settings: dict[str, Any], name: str = "run") -> Run:
    """A run of these settings: the mode, and fields of the run's and the policy's options."""
    known = {key: value for key, value in settings.items() if key in Options.__dataclass_fields__}
    return Run(Options(**known), policy_of(settings["mode"], settings), name)


def restore(run: Run, words: list[str]) -> None:
    """`restored v4 w0:4 w1:3`: as if a snapshot of that version were loaded."""
    seqs = {int(rank): int(number) for rank, number in (word[1:].split(":") for word in words[1:])}
    saved: dict[str, Any] = {
        "run": run.name, "server_incarnation": 1, "policy": run.policy.saved_state(),
        "rows": {rank: Row(seq, seq) for rank, seq in seqs.items()},
        "num_joins": dict.fromkeys(seqs, 1), "training": {},
    }  # fmt: skip
    run.restore(int(words[0][1:]), ("model", "sgd"), saved)


@dataclass
class Workers:
    """What the workers of a story know."""

    server_incarnation: int = 1
    processes: dict[int, int] = field(default_factory=dict)  # by rank: how many have asked for it
    incarnations: dict[int, int] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)  # of the weights each was given last
    local_steps: dict[int, int] = field(default_factory=dict)  # that its newest reply granted
    first: dict[str, int] = field(default_factory=dict)  # number of the first contribution of each process
    num_streams: int = 0

    def events_of(self, text: str) -> Iterator[events.Event]:
        """What a line of a story says, without its time."""
        verb, _, rest = text.partition(" ")
        if verb == "enter":
            yield from (self.event(f"{item} {rest}") for item in ("join", "heartbeat", "offer"))
        elif verb == "resume":
            yield self.event(f"join {rest} again")
            yield self.event(f"offer {rest}")
        else:
            yield self.event(text)

    def event(self, text: str) -> events.Event:
        verb, _, rest = text.partition(" ")
        match verb:
            case "join":
                return self._join(rest)
            case "after":
                return events.Ticked()
            case "stop" if not rest:
                return events.Stopped()
            case "fail":
                return events.Failed("the disk is gone", exit_code=14)
            case "stored":
                found = re.fullmatch(r"(\d+) v(\d+)", rest)
                assert found is not None, text
                return events.Stored(int(found[1]), int(found[2]))
        who, _, rest = rest.partition(" ")
        match = _WORKER.fullmatch(who)
        assert match is not None, f"no such event: {text}"
        rank = int(match[1])
        return self._of_a_worker(verb, rank, int(match[2] or self.incarnations.get(rank, 0)), rest)

    def _join(self, rest: str) -> events.Joined:
        self.num_streams += 1
        match = re.fullmatch(r"(?:w(\d+))?(?: again)?(?: as (\d+))?(?: of run (\w+))?", rest)
        assert match is not None, rest
        rank = int(match[1]) if match[1] else None
        if rank is None:
            return events.Joined(self.num_streams, process=f"stream {self.num_streams}")
        run = match[3] or ""
        if " again" in rest:
            incarnation = int(match[2] or self.incarnations[rank])
            process = self.process_of(rank)
            return events.Joined(self.num_streams, rank, run, incarnation, self.server_incarnation, process)
        self.processes[rank] = self.processes.get(rank, 0) + 1
        return events.Joined(self.num_streams, rank, run, process=self.process_of(rank))

    def process_of(self, rank: int) -> str:
        return f"w{rank}-{self.processes.get(rank, 0)}"

    def _of_a_worker(self, verb: str, rank: int, incarnation: int, rest: str) -> events.Event:
        seat = (rank, incarnation)
        match verb:
            case "offer":
                fields = dict(zip(rest.split()[::2], rest.split()[1::2], strict=True))
                return events.Offered(*seat, fields.get("model", "model"), fields.get("optimizer", "sgd"))
            case "bring":
                return events.Brought(*seat)
            case "contribute":
                return self._contributed(rank, incarnation, rest)
            case "repeat":
                return events.AskedAgain(*seat, int(rest[1:]))
            case "disconnect":
                return events.Disconnected(*seat)
            case "leave":
                return events.Left(*seat, "goodbye", "said goodbye")
            case "expel":
                return events.Expelled(*seat, "BAD_REQUEST", "what cannot be")
            case "stop":
                return events.StopAsked(*seat, "enough")
            case "failed":
                return events.Left(*seat, "failed", "ValueError: no such file", exit_code=3)
            case "finish":
                return events.Finished(*seat, stays=True)
            case "heartbeat":
                process = self.process_of(rank)
                return events.HeartbeatStopped(process) if rest == "stops" else events.HeartbeatBegan(process)
            case "heard":
                return events.Heartbeat(rank, self.process_of(rank))
        raise AssertionError(f"no such event: {verb}")

    def _contributed(self, rank: int, incarnation: int, rest: str) -> events.Contributed:
        found = _CONTRIBUTED.fullmatch(rest)
        assert found is not None, f"no such contribution: {rest}"
        seq = int(found[1])
        first = self.first.setdefault(self.process_of(rank), seq)
        part = int(found[7] or 0)  # those after the first have no step of their own
        return contributed(
            rank,
            incarnation,
            seq,
            int(found[2]) if found[2] else self.versions.get(rank, 0),
            num_samples=int(found[3] or 1),
            num_steps=0 if part > 1 else self.local_steps.get(rank) or 1,
            num_batches=0 if part > 1 else None,
            part=part,
            iteration=seq - first + 1,
            hyperparameters=({"lr": float(found[4])},) if found[4] else (),
            judgement=_JUDGEMENTS[found[5]] if found[5] else SOUND,
            **({"kind": ContributionKind.COMPLETION} if found[6] else {}),
        )

    def learn(self, found: Iterable[effects.Effect]) -> None:
        """They hear of what concerns them."""
        for effect in found:
            if isinstance(effect, effects.Seated):
                self.incarnations[effect.rank] = effect.incarnation
            elif isinstance(effect, effects.SendReply):
                self.versions[effect.rank] = effect.reply.result.version
                self.local_steps[effect.rank] = effect.reply.next_work.local_steps


def in_words(found: Iterable[effects.Effect]) -> str:
    """Effects in words; of the log only warnings, and nothing of what observers are told."""
    return "; ".join(words for effect in found if (words := _words(effect))) or "(nothing)"


def _words(effect: effects.Effect) -> str:
    match effect:
        case effects.Seated(_, rank, incarnation, is_resumed, number):
            where = (" again" if is_resumed else "") + (f" at s{number}" if number else "")
            return f"seat w{rank}.{incarnation}{where}"
        case effects.NotSeated(_, error):
            return f"no seat: {_named(error)}"
        case effects.Adopt(rank):
            return f"adopt the model of w{rank}"
        case effects.ForgetModel():
            return "forget the model"
        case effects.AskForWeights(rank):
            return f"ask w{rank} for weights"
        case effects.Begin(rank):
            return f"begin with the weights of w{rank}"
        case effects.ContributionTaken(contribution):
            how = "keep" if effect.is_kept else "discard"
            return f"{how} {_contribution(contribution.id)}" + (
                ", which counts" if effect.outcome in ("accepted", "skipped") and not effect.is_kept else ""
            )
        case effects.Fold(identity, weight, scale):
            return f"fold {_contribution(identity)}{f'*{weight:g}' if weight != 1 else ''}" + _scaled(scale)
        case effects.Fence(rank, incarnation):
            return f"fence w{rank}.{incarnation}"
        case effects.Commit():
            folded = " ".join(map(_contribution, effect.contributions))
            rate = f" lr {effect.hyperparameters[0]['lr']:g}" if effect.hyperparameters else ""
            return f"commit v{effect.version} [{folded}]{rate}{_scaled(effect.lr_scale)}"
        case effects.SendReply(rank, _, reply):
            outcome = reply.result.outcome.name
            how = "" if outcome == "APPLIED" else f" {outcome}"
            end = "" if reply.next_work.local_steps else ", all steps done"
            return f"reply w{rank}{how} v{reply.result.version}{end}"
        case effects.Refuse(rank, incarnation, error):
            return f"refuse w{rank}.{incarnation}: {_named(error)}"
        case effects.TellDone(workers, evaluator):
            who = ", ".join(f"w{rank}" for rank, _ in workers)
            return f"done: {who}" + (f"; w{evaluator} evaluates" if evaluator is not None else "")
        case effects.TakeSnapshot(attempt, version):
            return f"snapshot {attempt} of v{version}"
        case effects.Prune(version):
            return f"prune below v{version}"
        case effects.GoBack():
            return "go back to the newest snapshot"
        case effects.End(error):
            return "end" if error is None else f"end with {error.exit_code}: {error.message}"
        case effects.Log(level, event) if level in ("warning", "error"):
            return f"({event})"
    return ""


def _contribution(identity: ContributionId) -> str:
    return f"w{identity.rank}#{identity.seq}"


def _scaled(scale: float) -> str:
    return f" scaled {scale:g}" if scale != 1 else ""


def _named(error: Any) -> str:
    return error.reason.value if error.reason is not None else error.message


class Told:
    """A run, told as a story; `saved` is in its newest snapshot, after it has been JSON."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.workers = Workers(run.incarnation, dict.fromkeys(run.policy.rows, 0))
        self.now = 0.0
        self.saved: dict[str, Any] = {}
        self.facts: list[effects.Fact] = []

    def tell(self, text: str) -> str:
        if text.startswith("after "):
            self.now += float(text.split()[1])
        found: list[effects.Effect] = []
        for event in self.workers.events_of(text):
            event.at = self.now
            new = self.run.apply(event)
            self.workers.learn(new)
            found += new
        self.facts += [effect for effect in found if isinstance(effect, effects.Fact)]
        for effect in found:
            if isinstance(effect, effects.TakeSnapshot):
                self.saved = json.loads(json.dumps(effect.saved))
                for name in ("rows", "num_joins"):  # the manifest has numbers again
                    self.saved[name] = {int(rank): number for rank, number in self.saved[name].items()}
        return in_words(found)


def play(story: str, begin: Callable[[dict[str, Any], list[str]], Callable[[str], str]]) -> str:
    """The story with the right-hand sides as they are now. `begin(settings, words after "restored")` tells it."""
    lines = story.splitlines()
    width = max((len(line.split("->")[0].rstrip()) for line in lines if "->" in line), default=0)
    settings: dict[str, Any] = {}
    restored: list[str] = []
    tell: Callable[[str], str] | None = None
    output: list[str] = []
    for line in lines:
        words = line.split()
        if not words or words[0].startswith("#"):
            output.append(line)
        elif words[0] in ("mode", "option", "restored", "shards"):
            output.append(line)
            if words[0] == "restored":
                restored = words[1:]
            else:
                name, value = (words[0], words[1]) if words[0] != "option" else (words[1], words[2])
                settings[name] = yaml.safe_load(value)
        else:
            tell = tell or begin(settings, restored)
            event = line.split("->")[0].rstrip()
            output.append(f"{event:<{width}} -> {tell(' '.join(event.split()))}")
    return "\n".join(output) + "\n"


def compare(path: Path, transcript: str) -> None:
    """What was told is what the file says; PS_UPDATE_SCENARIOS=1 writes it anew."""
    expected = path.read_text(encoding="utf-8")
    if os.environ.get("PS_UPDATE_SCENARIOS") == "1":
        path.write_text(transcript, encoding="utf-8")
        return
    diff = "\n".join(
        difflib.unified_diff(expected.splitlines(), transcript.splitlines(), path.name, "now", lineterm="")
    )
    assert transcript == expected, f"PS_UPDATE_SCENARIOS=1 accepts this:\n{diff}"
