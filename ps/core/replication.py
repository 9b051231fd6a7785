"""Who says that an event happens, and when. One process says it at once; several shards, which carry out one run, when
it has come to all: state machine replication, without the network.

    a follower:     what has come to it  ──report──>  coordinator: has it come to all? then it happens
    all shards:     apply the same events in the same order  <──event, numbered──

Messages are numbered and kept until the other side says that it has them, so a connection that breaks and is made again
loses nothing. Coordinator and followers compare digests of their state; a difference ends the run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ...common.errors import Reason, refusal
from . import events
from .effects import Effect, TakeSnapshot
from .events import Event
from .judgement import Judgement

Message = TypeVar("Message")

# Between two comparisons of digests; one more at every snapshot. A digest costs about 50 us.
DIGEST_EVERY_EVENTS = 256


class Sequencer:
    """Between what comes to a process and what happens to its run: whatever carries the run (`ps/engine/engine.py`)
    offers events, and `happens` is called with those that do. This one is the only process: what comes, happens."""

    def __init__(self, happens: Callable[[Event], None], now: Callable[[], float]) -> None:
        self._happens = happens
        self._now = now

    def offer(self, event: Event) -> None:
        """Something has come to this process."""
        event.at = self._now()
        self._happens(event)

    def fenced(self, rank: int, incarnation: int) -> None:
        """Nothing of this incarnation of a rank, or an older one, is waited for any more."""

    def applied(self, effects: list[Effect]) -> None:
        """The newest event has been applied, and led to these effects."""

    def missing(self, rank: int) -> str:
        """Which shards have not got what this worker is to give them, as a phrase; or empty."""
        return ""


class Outbox(Generic[Message]):
    """One direction's messages on their way, numbered from 1, and how far the other direction has been heard."""

    def __init__(self) -> None:
        self.on_put: Callable[[], object] = lambda: None  # called for each new message
        self.num_put = 0
        self.num_received = 0  # of the other side's
        self._kept: deque[tuple[int, Message]] = deque()

    def put(self, message: Message) -> int:
        """The number of a new message."""
        self.num_put += 1
        self._kept.append((self.num_put, message))
        self.on_put()
        return self.num_put

    def acknowledge(self, number: int) -> None:
        """The other side has all up to this one."""
        while self._kept and self._kept[0][0] <= number:
            self._kept.popleft()

    def after(self, number: int) -> list[tuple[int, Message]]:
        """What is kept beyond this one, to be sent, or sent again."""
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


class Gather:
    """What has come to which shard, until it has come to all."""

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        # By rank (None: of no worker) and by what it is: what has come to which shard.
        self._found: dict[int | None, dict[tuple[object, ...], dict[int, Event]]] = {}
        self._fenced: dict[int, int] = {}

    def add(self, shard: int, event: Event) -> list[Event]:
        """Everyone's, in the order of shards, when this one completes them; empty otherwise."""
        if isinstance(event, events.AboutAWorker) and event.incarnation <= self._fenced.get(event.rank, 0):
            return []
        key, rank = events.key_of(event), event.rank if isinstance(event, events.AboutAWorker) else None
        of_rank = self._found.setdefault(rank, {})
        found = of_rank.setdefault(key, {})
        found[shard] = event
        if len(found) < self._num_shards:
            return []
        del of_rank[key]
        if not of_rank:
            del self._found[rank]
        return [found[index] for index in range(self._num_shards)]

    def fence(self, rank: int, incarnation: int) -> None:
        """The worker is gone, or begins again as another incarnation."""
        self._fenced[rank] = max(incarnation, self._fenced.get(rank, 0))
        of_rank = self._found.pop(rank, {})
        if newer := {key: found for key, found in of_rank.items() if _incarnation(found) > incarnation}:
            self._found[rank] = newer

    def missing(self, rank: int) -> tuple[str, list[int]]:
        """The kind of event of this rank that some shard waits for, and the shards that it has not come to."""
        for found in self._found.get(rank, {}).values():
            name = type(next(iter(found.values()))).__name__
            return name, [shard for shard in range(self._num_shards) if shard not in found]
        return "", []


def _incarnation(found: dict[int, Event]) -> int:
    """Of what has come of a worker."""
    event = next(iter(found.values()))
    assert isinstance(event, events.AboutAWorker)
    return event.incarnation


@dataclass(frozen=True, slots=True)
class Digest:
    """The state of a shard after so many events."""

    num_events: int
    digest: str


# What a shard has not got yet, as people are told about it.
_WHAT = {
    "Contributed": "its part of the contribution",
    "Brought": "its part of the initial weights",
    "Offered": "this worker's connection",
    "AskedAgain": "this worker's question",
}


class Coordinator(Sequencer):
    """Shard 0: says what happens, in which order, to itself and to the others. `judge` is what becomes of a
    contribution by its parts' judgements."""

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
        self._judge = judge
        self._digest = digest
        self._gather = Gather(num_shards)
        self._num_applied = 0
        self._digests: dict[int, dict[int, str]] = {}  # by number of events, of the shards that have said it
        self._do_differ = False  # said once

    def offer(self, event: Event) -> None:
        self._take(0, event)

    def hear(self, shard: int, number: int, event: Event | Digest) -> None:
        """A numbered report of another shard. Refuses what no shard says."""
        if not self.outboxes[shard].hear(number):
            return
        if isinstance(event, Digest):
            self._compare(shard, event)
        elif not event.is_gathered:
            raise refusal(Reason.BAD_REQUEST, f"{type(event).__name__} is not for shard {shard} to say")
        else:
            self._take(shard, event)

    def _take(self, shard: int, event: Event) -> None:
        """It happens if it need not come to all shards, or has."""
        if parts := self._gather.add(shard, event) if event.is_gathered else [event]:
            event = self._one_of(parts)
            event.at = self._now()
            for outbox in self.outboxes.values():
                outbox.put(event)
            self._happens(event)

    def _one_of(self, parts: list[Event]) -> Event:
        """What has happened when these have come, one to each shard."""
        first = parts[0]
        for shard, other in enumerate(parts[1:], 1):
            if isinstance(first, events.AboutAWorker) and (differences := events.differences(first, other)):
                message = f"shards 0 and {shard} were told different things: {'; '.join(differences)}"
                return events.Expelled(first.rank, first.incarnation, Reason.BAD_REQUEST.value, message)
        if isinstance(first, events.Contributed):
            judgements = [part.judgement for part in parts if isinstance(part, events.Contributed)]
            return replace(first, judgement=self._judge(judgements))
        if isinstance(first, events.Measured):
            return replace(first, norm=math.hypot(*(part.norm for part in parts if isinstance(part, events.Measured))))
        if isinstance(first, events.Stored):
            return replace(first, durable=min(part.durable for part in parts if isinstance(part, events.Stored)))
        return first

    def fenced(self, rank: int, incarnation: int) -> None:
        self._gather.fence(rank, incarnation)

    def missing(self, rank: int) -> str:
        kind, shards = self._gather.missing(rank)
        return f"shard {', '.join(map(str, shards))} to have {_WHAT[kind]}" if kind else ""

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
            fix = "report this with the history; snapshots of before are sound"
            self.offer(events.Failed(message, exit_code=1, fix=fix))
        if len(found) > len(self.outboxes):
            del self._digests[reported.num_events]


class Follower(Sequencer):
    """Another shard: reports what comes to it, applies what the coordinator says."""

    def __init__(self, *, happens: Callable[[Event], None], digest: Callable[[], str]) -> None:
        self.outbox: Outbox[object] = Outbox()  # events, digests, and what the shard itself has to say
        self._happens = happens
        self._digest = digest
        self._num_applied = 0

    def offer(self, event: Event) -> None:
        """What is not for all shards to have, the coordinator sees for itself."""
        if event.is_gathered:
            self.outbox.put(event)

    def hear(self, number: int, event: Event) -> None:
        """What happens, in the coordinator's order."""
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
