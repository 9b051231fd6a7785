"""Orders the events of a run: state machine replication, without the network.

A single process applies an event at once. With several shards an event happens once it has arrived on all.

    a follower      reports each arrival  ──report──>  the coordinator, which waits until all shards have reported
    all shards      apply the same events in the same order  <──event, numbered──

Messages are numbered, and kept until the other side acknowledges them. So a new connection loses nothing. Coordinator
and followers compare digests of their state; a difference ends the run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, TypeVar

from ...common.errors import Reason, refusal
from ...common.tensors.judgement import Judgement
from . import events
from .effects import Effect, TakeSnapshot
from .events import Event

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
