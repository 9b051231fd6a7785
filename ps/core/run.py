"""The run: `apply(event) -> effects`. It has no clock.

The same events give the same state and the same effects on every shard. So history, replay, simulation and several
shards are one mechanism, and a bug report is a list of events. Each class extends the one before: `RunState`
(`state.py`), `Ending`, `Evaluating`, `Run`. `contributions.py` has the effects of a contribution. An exception in here
is a bug: the run ends, and no snapshot is taken of its state.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from ...common.errors import ParamServerError, Reason, refusal
from ...common.tensors.judgement import Judgement
from ...common.wire.records import Base, Contribution, ContributionId, Counts
from ..policies.base import Policy
from . import controls, effects, events
from .effects import Effect, Log, TakeSnapshot
from .ending import Evaluating, stopping
from .events import Event
from .roster import Worker, replaced
from .state import Options

# ---- replication ----------------------------------------------------------------------------------------

# Orders the events of a run: state machine replication, without the network.
#
# A single process applies an event at once. With several shards an event happens once it has arrived on all.
#
#     a follower      reports each arrival  ──report──>  the coordinator, which waits until all shards have reported
#     all shards      apply the same events in the same order  <──event, numbered──
#
# Messages are numbered, and kept until the other side acknowledges them. So a new connection loses nothing. Coordinator
# and followers compare digests of their state; a difference ends the run.

Message = TypeVar("Message")

# Events between two comparisons of digests; each snapshot adds one. A digest costs about 50 us.
DIGEST_EVERY_EVENTS = 256


class Sequencer:
    """Turns offered events into events that happen. The engine (`ps/engine/engine.py`) offers an event, and the
    sequencer calls `happens`. This class is for a server of one process: each offered event happens at once."""

    compares = False  # `applied` compares the states of several shards

    def __init__(self, happens: Callable[[Event], None], now: Callable[[], float]) -> None:
        self._happens, self._now = happens, now

    def offer(self, event: Event) -> None:
        """Take an event that has arrived at this process."""
        event.at = self._now()
        self._happens(event)

    def fenced(self, rank: int, incarnation: int) -> None:
        """Stop waiting for events of this incarnation of a rank and of older ones."""

    def applied(self, effects: list[Effect]) -> None:
        """Note that the newest event was applied, and led to these effects."""

    def missing(self, rank: int) -> str:
        """Returns the shards that still wait for something of this worker, as a phrase; empty: none."""
        return ""


class Outbox(Generic[Message]):
    """Unacknowledged messages of one direction, numbered from 1, and the number of messages received in the other."""

    def __init__(self) -> None:
        self.on_put: Callable[[], object] = lambda: None  # called for each new message
        self.num_put = 0
        self.num_received = 0  # of the other side's
        self._kept: deque[tuple[int, Message]] = deque()

    def put(self, message: Message) -> int:
        """Keep a new message; returns its number."""
        self.num_put += 1
        self._kept.append((self.num_put, message))
        self.on_put()
        return self.num_put

    def acknowledge(self, number: int) -> None:
        """The other side has received all messages up to this one."""
        while self._kept and self._kept[0][0] <= number:
            self._kept.popleft()

    def after(self, number: int) -> list[tuple[int, Message]]:
        """Returns the kept messages beyond this one, to be sent, perhaps again."""
        return [item for item in self._kept if item[0] > number]

    def can_go_on_after(self, number: int) -> bool:
        """Whether everything beyond this one is still kept."""
        first = self._kept[0][0] if self._kept else self.num_put + 1
        return first <= number + 1 <= self.num_put + 1

    def hear(self, number: int) -> bool:
        """Whether the other side's message with this number is new; it came twice otherwise. Refuses a gap."""
        if number > self.num_received + 1:
            raise refusal(Reason.BAD_REQUEST, f"message {number} after {self.num_received}: some were lost")
        if number <= self.num_received:
            return False
        self.num_received = number
        return True


@dataclass(frozen=True, slots=True)
class Digest:
    """The state of a shard after so many events."""

    num_events: int
    digest: str


# The missing thing of each incomplete event, in a phrase for people.
_WHAT: dict[type[Event], str] = {
    events.Contributed: "its part of the contribution",
    events.Brought: "its part of the initial weights",
    events.Offered: "this worker's connection",
    events.AskedAgain: "this worker's question",
}


class Coordinator(Sequencer):
    """Shard 0: collects the shards' reports of gathered events, and orders all events for itself and the other shards.

    `judge` combines the parts' judgements of a contribution."""

    compares = True

    def __init__(
        self,
        num_shards: int,
        *,
        happens: Callable[[Event], None],
        now: Callable[[], float],
        judge: Callable[[list[Judgement]], Judgement],
        digest: Callable[[], str],
    ) -> None:
        super().__init__(happens, now)
        self.outboxes: dict[int, Outbox[Event]] = {shard: Outbox() for shard in range(1, num_shards)}
        self._judge, self._digest = judge, digest
        # By rank (None: no worker) and key of the event: the report of each shard, until all have reported the event.
        self._reports: dict[int | None, dict[tuple[Any, ...], dict[int, Event]]] = {}
        self._fenced: dict[int, int] = {}
        self._num_applied = 0
        self._digests: dict[int, dict[int, str]] = {}  # by number of events and shard
        self._do_differ = False  # reported once

    def offer(self, event: Event) -> None:
        self._take(0, event)

    def hear(self, shard: int, number: int, event: Event | Digest) -> None:
        """Take a numbered report of another shard. Refuses kinds that no shard reports."""
        if not self.outboxes[shard].hear(number):
            return
        if isinstance(event, Digest):
            self._compare(shard, event)
        elif not event.is_gathered:
            raise refusal(Reason.BAD_REQUEST, f"shard {shard} may not report {type(event).__name__}")
        else:
            self._take(shard, event)

    def _take(self, shard: int, event: Event) -> None:
        """Let the event happen if it concerns one shard, or if all shards have reported it."""
        if event.is_gathered:
            rank = event.rank if isinstance(event, events.AboutAWorker) else None
            if isinstance(event, events.AboutAWorker) and event.incarnation <= self._fenced.get(event.rank, 0):
                return
            of_rank = self._reports.setdefault(rank, {})
            reports = of_rank.setdefault(key := events.key_of(event), {})
            reports[shard] = event
            if len(reports) <= len(self.outboxes):
                return
            del of_rank[key]
            if not of_rank:
                del self._reports[rank]
            event = self._one_of([reports[index] for index in sorted(reports)])
        event.at = self._now()
        for outbox in self.outboxes.values():
            outbox.put(event)
        self._happens(event)

    def _one_of(self, parts: list[Any]) -> Event:
        """Returns the event that follows from the reports of all shards."""
        first: Event = parts[0]
        for shard, other in enumerate(parts[1:], 1):
            if isinstance(first, events.AboutAWorker) and (differ := events.differences(asdict(first), asdict(other))):
                message = f"shards 0 and {shard} received different messages: {'; '.join(differ)}"
                return events.Expelled(first.rank, first.incarnation, Reason.BAD_REQUEST.value, message)
        match first:
            case events.Contributed():
                return replace(first, judgement=self._judge([part.judgement for part in parts]))
            case events.Measured():
                return replace(first, norm=math.hypot(*(part.norm for part in parts)))
            case events.Stored():
                return replace(first, durable=min(part.durable for part in parts))
        return first

    def fenced(self, rank: int, incarnation: int) -> None:
        """Drop reports of a worker that is gone, or that begins again as another incarnation."""
        self._fenced[rank] = max(incarnation, self._fenced.get(rank, 0))
        of_rank = self._reports.pop(rank, {})
        if newer := {key: found for key, found in of_rank.items() if key[2] > incarnation}:
            self._reports[rank] = newer

    def missing(self, rank: int) -> str:
        reports = next(iter(self._reports.get(rank, {}).values()), None)
        if reports is None:
            return ""
        shards = [str(shard) for shard in range(len(self.outboxes) + 1) if shard not in reports]
        return f"shard {', '.join(shards)} to have {_WHAT[type(next(iter(reports.values())))]}"

    # ---- are all in the same state? ---------------------------------------------------------

    def applied(self, effects: list[Effect]) -> None:
        self._num_applied += 1
        if is_compared(self._num_applied, effects):
            self._compare(0, Digest(self._num_applied, self._digest()))

    def _compare(self, shard: int, reported: Digest) -> None:
        found = self._digests.setdefault(reported.num_events, {})
        found[shard] = reported.digest
        if len(set(found.values())) > 1 and not self._do_differ:
            self._do_differ = True
            shown = ", ".join(f"shard {item} {digest}" for item, digest in sorted(found.items()))
            message = f"the shards are not in the same state after event {reported.num_events}: {shown}"
            fix = "report this with the history; earlier snapshots are sound"
            self.offer(events.Failed(message, exit_code=1, fix=fix))
        if len(found) > len(self.outboxes):
            del self._digests[reported.num_events]


class Follower(Sequencer):
    """Another shard: reports its events to the coordinator, and applies those that the coordinator orders."""

    compares = True

    def __init__(self, *, happens: Callable[[Event], None], digest: Callable[[], str]) -> None:
        self.outbox: Outbox[object] = Outbox()  # events, digests, and reports about the shard itself
        self._happens, self._digest = happens, digest
        self._num_applied = 0

    def offer(self, event: Event) -> None:
        """Report an event that all shards receive. The coordinator sees the other kinds itself."""
        if event.is_gathered:
            self.outbox.put(event)

    def hear(self, number: int, event: Event) -> None:
        """Apply an event, in the coordinator's order."""
        if self.outbox.hear(number):
            self._happens(event)

    def applied(self, effects: list[Effect]) -> None:
        self._num_applied += 1
        if is_compared(self._num_applied, effects):
            self.outbox.put(Digest(self._num_applied, self._digest()))

    def missing(self, rank: int) -> str:
        return "the coordinator"


def is_compared(num_events: int, effects: Iterable[Effect]) -> bool:
    """Whether shards compare their states after this event."""
    return num_events % DIGEST_EVERY_EVENTS == 0 or any(isinstance(effect, TakeSnapshot) for effect in effects)


# ---- run ------------------------------------------------------------------------------------------------


_LOST = "connection lost"  # why a worker is away, or left


class Run(Evaluating):
    """Dispatches events and admits workers."""

    def __init__(self, options: Options, policy: Policy, name: str, incarnation: int = 1) -> None:
        super().__init__(options, policy, name, incarnation)
        # The method that handles each kind of event; those about a worker get it too.
        self._happens: dict[type[events.Event], Callable[..., Iterable[Effect]]] = {
            events.AskedAgain: self._asked_again,
            events.Disconnected: self._disconnected,
            events.Left: self._left,
            events.Expelled: lambda worker, event: self.expel(
                worker, refusal(Reason[event.reason], event.message), event.at
            ),
            events.Offered: self._offered,
            events.Brought: self._brought,
            events.Finished: self._finished,
            events.StopAsked: self._stop_asked,
            events.Contributed: self._contributed,
            events.Joined: self._joined,
            events.HeartbeatBegan: self._heartbeat_began,
            events.HeartbeatStopped: self._heartbeat_stopped,
            events.Heartbeat: self._heartbeat,
            events.MetricsReceived: self._metrics_received,
            events.CopyAsked: lambda event: (
                [effects.KeepWeights(self.policy.version, event.reader)] if self.has_weights else ()
            ),
            events.Measured: lambda event: [effects.Clip(event.version, event.norm)],
            events.Stored: self._stored,
            events.CommitterReplied: self._committer_replied,
            events.Controlled: partial(controls.follow, self),
            events.Ticked: self._ticked,
            events.Stopped: lambda event: self._close(stopping(), event.at),
            events.Failed: self._failed,
        }

    # ---- one event ------------------------------------------------------------------------

    def apply(self, event: events.Event) -> list[Effect]:
        """Changes the state by one event, and returns the effects in order."""
        handle = self._happens[type(event)]
        if isinstance(event, events.AboutAWorker):
            seat = event.contribution.id if isinstance(event, events.Contributed) else event
            worker = self.roster.workers.get(seat.rank)
            is_gone = worker is None or worker.incarnation != seat.incarnation
            if worker is None or is_gone or (self.is_closed and isinstance(event, _BEFORE_THE_END)):
                # It was released or replaced, or the run has ended; it was notified.
                return self.contributions.refuse(event) if isinstance(event, events.Contributed) else []
            heard_at = self.roster.heard_at
            if worker.rank in heard_at and not isinstance(event, events.Disconnected | events.Left):
                heard_at[worker.rank] = event.at  # it renews the worker's lease, as a heartbeat does
                heard_at.move_to_end(worker.rank)
            found = handle(worker, event)
        else:
            found = handle(event)
        return found if isinstance(found, list) else list(found)

    def _heartbeat_began(self, event: events.HeartbeatBegan) -> Iterator[Effect]:
        self.roster.heartbeats[event.process] += 1
        if event.is_outside:
            self.roster.outsiders.add(event.process)
            yield Log("info", "evaluator", {"meaning": "a process that does not train evaluates"})

    def _heartbeat_stopped(self, event: events.HeartbeatStopped) -> Iterable[Effect]:
        departed = self.roster.heartbeat_stopped(event.process)
        return () if departed is None else self._leave(departed, "closed", _LOST, event.at)

    def _heartbeat(self, event: events.Heartbeat) -> Iterable[Effect]:
        self.roster.heartbeat(event.rank, event.process, event.at)
        return ()

    # ---- a worker's way in ----------------------------------------------------------------

    def _joined(self, joined: events.Joined) -> Iterator[Effect]:
        may_resume = self._may_resume(joined)
        try:
            if joined.run and joined.run != self.name:
                problem = f"this worker belongs to run {joined.run}, and the restarted server runs {self.name}"
                raise refusal(Reason.RUN_MISMATCH, problem, fix="start the worker again to join the new run")
            if self.is_closed:
                raise stopping()
            if self.is_done and not may_resume:
                raise refusal(Reason.DRAINING, "the run is over", fix="start ps-server again for another run")
            worker, old = self.roster.seat(joined)
        except ParamServerError as error:
            yield effects.NotSeated(joined.stream, error)
            return
        self.lost_at |= dict.fromkeys(self.returning, joined.at)
        self.returning = []
        if not joined.incarnation:  # another process than the one that had them
            self.policy.newest_holders -= {worker.rank}
        if old is not None:
            if may_resume:
                worker.goes_on_from(old)
            yield from self._displace(old, worker, joined.at)
        rank = worker.rank
        yield effects.Seated(joined.stream, rank, worker.incarnation, may_resume, self.policy.seq(rank))

    def _may_resume(self, joined: events.Joined) -> bool:
        """Whether the process lost only its connection, perhaps before it received its newest incarnation, and so
        continues where it was."""
        known = self.roster.workers.get(joined.rank) if joined.rank is not None else None
        if known is None or joined.server_incarnation != self.incarnation or not self._has_place(known):
            return False
        is_same = joined.process == known.process != "" and 0 < joined.incarnation < known.incarnation
        return is_same or joined.incarnation == known.incarnation

    def _has_place(self, worker: Worker) -> bool:
        """Whether the worker may come back after a lost connection."""
        return worker.rank in self.policy.members or worker.is_finished

    def _displace(self, old: Worker, new: Worker, at: float) -> Iterator[Effect]:
        """Refuse the older stream or process of a rank, which was replaced."""
        yield effects.Refuse(old.rank, old.incarnation, replaced(old.rank, old.incarnation))
        yield effects.Fence(old.rank, old.incarnation)
        if self.has_weights and self.initializer is old:
            self.initializer = None
        if new.is_resumed:
            self.policy.disconnected(new.rank)
            return
        yield effects.WorkerLeft(old.rank, old.incarnation, "replaced", "")
        yield Log("warning", "replaced", {"rank": old.rank, "incarnation": old.incarnation, "by": new.incarnation})
        if not self.has_weights:
            yield from self._pass_on(old)
        yield from self.performed(self.policy.left(old.rank, at), at)

    def _offered(self, worker: Worker, event: events.Offered) -> Iterator[Effect]:
        """Take a worker's model, which every shard now has. The first worker's model and optimizer become the run's."""
        worker.model, worker.rendezvous = (event.model, event.optimizer), event.rendezvous
        if self.model != worker.model:
            if self.model is not None and (self.model[0] != event.model or not self.may_change_optimizer):
                part = "model" if self.model[0] != event.model else "optimizer"
                reason = Reason.MODEL_MISMATCH if part == "model" else Reason.OPTIMIZER_MISMATCH
                message = f"the {part} of rank {worker.rank} differs from the run's, which is that of its first worker"
                yield from self.expel(worker, refusal(reason, message), event.at)
                return
            self.model = worker.model
            yield effects.Adopt(worker.rank, worker.incarnation)
        self.may_change_optimizer = False
        if worker.is_resumed:
            worker.is_away = False
            seq = self.policy.seq(worker.rank)
            yield effects.WorkerMoved(worker.rank, worker.incarnation, "back", seq)
            yield Log("info", "resumed", {"rank": worker.rank, "seq": seq})
        elif not self.is_holding:
            if self.has_weights and self.initializer is None:
                yield from self._enter(worker, event.at)
            else:
                yield from self._ask_the_first()

    def _brought(self, worker: Worker, event: events.Brought) -> Iterator[Effect]:
        if worker is not self.initializer:
            error = refusal(Reason.BAD_REQUEST, "weights that the server did not request")
            yield from self.expel(worker, error, event.at)
            return
        is_final, self.has_weights, self.initializer = self.has_weights, True, None
        yield effects.Begin(worker.rank, worker.incarnation)
        if is_final:
            self.policy.weights_uploaded()
            yield from self._enter_all(event.at)
            yield from self._end_if_over(event.at)
            return
        if self.rhythm.is_kept:  # a restart without any snapshot would be another run
            yield from self._take_snapshot(event.at)
        self.is_holding = self.rhythm.is_writing
        if not self.is_holding and not self.is_closed:
            yield from self._enter_all(event.at)

    def _enter_all(self, at: float) -> Iterator[Effect]:
        self.is_holding = False
        for worker in list(self.roster.workers.values()):
            if worker.model is not None and not worker.is_finished and worker.rank not in self.policy.members:
                yield from self._enter(worker, at)

    def _enter(self, worker: Worker, at: float) -> Iterator[Effect]:
        """Admit a worker. Its reply comes when the mode allows it to start."""
        if self.policy.is_stopping and self.rhythm.is_local:
            yield from self.expel(worker, refusal(Reason.DRAINING, f"the run is over: {self.ended_by}"), at)
            return
        if not self.policy.members and not self.policy.has_newest_weights:
            if self.rhythm.keeps_optimizer and self.rhythm.durable_version:
                meaning = "all workers went or were away too long: the run goes back to its newest snapshot"
                yield Log("error", "weights_lost", {"version": self.policy.version, "meaning": meaning})
                yield effects.GoBack()
            else:
                yield from self._ask_for_newest("all workers that had the newest went, or were away too long")
            return
        self.lost_at.pop(worker.rank, None)
        worker.waiting_since = at
        decisions = self.policy.joined(worker.rank, at)
        seq = self.policy.seq(worker.rank)
        yield effects.WorkerMoved(worker.rank, worker.incarnation, "enter", seq)
        yield Log("routine", "admitted", {"rank": worker.rank, "seq": seq})
        yield from self.performed(decisions, at)

    # ---- contributions --------------------------------------------------------------------

    def _contributed(self, worker: Worker, event: events.Contributed) -> Iterable[Effect]:
        rank, first = worker.rank, event.contribution.first
        if rank not in self.policy.members:
            error = refusal(Reason.NOT_JOINED, f"rank {rank} has no weights to compute on yet")
            return [*self.contributions.refuse(event), *self.expel(worker, error, event.at)]
        announced = list(self.length.announced(rank, first.run_steps)) if first is not None and first.run_steps else []
        return announced + self._after(self.contributions.taken(worker, event), event.at)

    def _asked_again(self, worker: Worker, event: events.AskedAgain) -> Iterable[Effect]:
        """Reply again to a contribution that counts."""
        rank, seq, policy, at = worker.rank, event.seq, self.policy, event.at
        if rank not in policy.members or seq != policy.seq(rank):
            message = f"rank {rank} asks again about contribution {seq}; the last that counts is {policy.seq(rank)}"
            return self.expel(worker, refusal(Reason.SEQ_GAP, message), at)
        worker.waiting_since = at
        id, base = ContributionId(rank, worker.incarnation, seq), Base(policy.version)
        repeated = Contribution(id, base=base, counts=Counts(0, 0, 0))
        taken = effects.ContributionTaken(repeated, policy.version, "repeated", -1.0)
        return [taken, *self.performed(policy.contributed(rank, repeated, at), at)]

    # ---- snapshots ------------------------------------------------------------------------

    def _stored(self, event: events.Stored) -> Iterator[Effect]:
        """Handle the end of a snapshot attempt on all shards."""
        if not self.rhythm.ended(event.attempt, event.durable):
            return
        yield effects.Prune(self.rhythm.durable_version)
        if self.is_closed:
            if self.has_weights and self.rhythm.wants_last(self.policy.version):
                yield from self._take_snapshot(event.at)
            return
        if self.is_holding:
            yield from self._enter_all(event.at)
        yield from self._end_if_over(event.at)

    def _committer_replied(self, event: events.CommitterReplied) -> Iterable[Effect]:
        """The committer decides the division of the data and the end of the run."""
        self.roster.num_before, self.roster.num_others = event.num_before, event.num_others
        for rank in event.lost:
            stats = self.roster.stats[rank]
            stats.dropped += 1
            self.policy.uncount(rank, (stats.recent[-1].samples or 0) if stats.recent else 0)
        if event.is_final:
            self.rhythm.needs_final, self.may_ask = False, event.may_ask
        is_through = self.policy.rows and all(map(self.policy.is_through, self.policy.rows))
        if event.over and not (is_through or self.policy.is_stopping):
            return self.stop(event.over, event.at)
        return ()

    # ---- workers that are lost -------------------------------------------------------------------------

    def _disconnected(self, worker: Worker, event: events.Disconnected) -> Iterator[Effect]:
        """Handle a lost stream. While its process sends heartbeats, the worker may come back and continue."""
        if not (worker.process in self.roster.heartbeats and self._has_place(worker)):
            yield from self._leave(worker, "closed", _LOST, event.at)
            return
        worker.is_away = True
        self.policy.disconnected(worker.rank)
        yield effects.Fence(worker.rank, worker.incarnation)
        yield effects.WorkerMoved(worker.rank, worker.incarnation, "away", self.policy.seq(worker.rank))
        yield Log("warning", "away", {"rank": worker.rank, "incarnation": worker.incarnation, "reason": _LOST})

    def _ticked(self, event: events.Ticked) -> Iterator[Effect]:
        at, silent = event.at, self.roster.silent(event.at)
        if self.is_closed:
            return
        for worker, silent_s in silent:
            reason = f"no message for {silent_s:.1f} s (server.lease_s is {self.options.lease_s:g})"
            error = refusal(Reason.NOT_JOINED, f"rank {worker.rank} was released: {reason}")
            yield from self.expel(worker, error, at, "lease", reason)
        if self.has_weights:
            yield from self.performed(self.policy.tick(at), at)
        yield from self._end_if_over(at)


# Events that a closed run ignores.
_BEFORE_THE_END = events.Offered | events.Brought | events.Contributed | events.AskedAgain | events.StopAsked
