"""Several shards in one process, without a network: each with a run of its own, joined by outboxes.

What a worker says comes to the shards in the order of their numbers, or to those named after `at`. Between a shard
and the coordinator messages go as JSON and arrive at once, unless the story says otherwise:

    contribute w0 s1 at 0,2       it comes to these shards only
    hold 1, let 1                 messages between shards 0 and 1 stay on the way; they arrive
    cut 1, mend 1                 that connection breaks off, with what was on the way; it is made again
    pause 0, go on 0              the coordinator's process stands still; then it hears what came meanwhile
    shard 1 says ...              a report that shard 1 should not make
    damage 1                      the state of shard 1 is no longer what it should be

Every follower is checked to have done what the coordinator did, as far as it has come.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from paramserver.common.config.sections.training import StoreConfig
from paramserver.common.tensors.judgement import judge_whole
from paramserver.ps.core import effects, events
from paramserver.ps.core.run import Coordinator, Digest, Follower, Outbox, Run, Sequencer

LINES = events.Lines((*events.KINDS, Digest))


class Shard:
    """One process: a run, and who says what happens to it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.sequencer: Sequencer | None = None
        self.applied: list[tuple[events.Event, list[effects.Effect]]] = []
        self._events: deque[events.Event] = deque()
        self._is_applying = False

    def happens(self, event: events.Event) -> None:
        """As `Engine.happens`: what happens meanwhile happens after it."""
        self._events.append(event)
        if self._is_applying:
            return
        self._is_applying = True
        while self._events:
            event = self._events.popleft()
            found = self.run.apply(event)
            self.applied.append((event, found))
            for effect in found:
                if isinstance(effect, effects.Fence):
                    self.sequencer.fenced(effect.rank, effect.incarnation)
            self.sequencer.applied(found)
        self._is_applying = False


@dataclass
class Way:
    """One direction of a connection: what was sent on it and has not arrived."""

    outbox: Outbox[Any]  # of the side that sends
    heard: Callable[[], int]  # by the other side
    arrives: Callable[[int, Any], None]
    num_sent: int = 0
    on_the_way: deque[tuple[int, str]] = field(default_factory=deque)

    def send(self) -> None:
        for number, message in self.outbox.after(self.num_sent):
            self.on_the_way.append((number, LINES.write(message)))
            self.num_sent = number

    def deliver(self) -> bool:
        """The next message arrives; False when there is none."""
        if not self.on_the_way:
            return False
        number, text = self.on_the_way.popleft()
        self.arrives(number, LINES.read(text))
        self.outbox.acknowledge(self.heard())
        return True

    def cut(self) -> None:
        """What was on the way is gone; the other side says how far it has heard when the connection is made again."""
        self.on_the_way.clear()
        assert self.outbox.can_go_on_after(self.heard())
        self.num_sent = self.heard()


class Link:
    """Between the coordinator and one follower."""

    def __init__(self, shard: int, coordinator: Coordinator, follower: Follower, hears: Callable[..., None]) -> None:
        down, up = coordinator.outboxes[shard], follower.outbox
        self.is_up, self.is_held = True, False
        self.ways = [
            Way(down, lambda: up.num_received, follower.hear),
            Way(up, lambda: down.num_received, lambda number, message: hears(shard, number, message)),
        ]

    def pump(self) -> bool:
        """Whether something arrived."""
        if not self.is_up:
            return False
        for way in self.ways:
            way.send()
        if self.is_held:
            return False
        num_arrived = sum(way.deliver() for way in self.ways)
        return num_arrived > 0

    def cut(self) -> None:
        self.is_up = False
        for way in self.ways:
            way.cut()


class Shards:
    """All of them; `now` is the coordinator's clock."""

    def __init__(self, make_run: Callable[[], Run], num_shards: int) -> None:
        self.now = 0.0
        self.shards = [Shard(make_run()) for _ in range(num_shards)]
        first = self.shards[0]
        self.coordinator = Coordinator(
            num_shards, happens=first.happens, now=lambda: self.now, judge=partial(judge_whole, StoreConfig()),
            digest=first.run.digest,
        )  # fmt: skip
        first.sequencer = self.coordinator
        self.links: dict[int, Link] = {}
        self.is_paused = False
        self._came_meanwhile: deque[Callable[[], None]] = deque()
        for number, shard in enumerate(self.shards[1:], 1):
            shard.sequencer = follower = Follower(happens=shard.happens, digest=shard.run.digest)
            self.links[number] = Link(number, self.coordinator, follower, self._heard)
        self.is_checked = True
        self._num_checked = [0] * num_shards

    @property
    def run(self) -> Run:
        return self.shards[0].run

    def offer(self, event: events.Event, at: list[int] | None = None) -> None:
        """Something comes to these shards; what only the coordinator sees comes to it alone."""
        for shard in at if at is not None else range(len(self.shards) if event.is_gathered else 1):
            self._comes(shard, partial(self.shards[shard].sequencer.offer, event))

    def _heard(self, shard: int, number: int, message: Any) -> None:
        self._comes(0, partial(self.coordinator.hear, shard, number, message))

    def _comes(self, shard: int, work: Callable[[], None]) -> None:
        if shard == 0 and self.is_paused:
            self._came_meanwhile.append(work)
        else:
            work()

    def pause(self) -> None:
        """The coordinator stands still."""
        self.is_paused = True

    def go_on(self) -> None:
        self.is_paused = False
        while self._came_meanwhile:
            self._came_meanwhile.popleft()()

    def pump(self) -> None:
        """Let everything arrive that can."""
        while sum(link.pump() for link in self.links.values()):
            pass
        self.check()

    def settle(self) -> None:
        """All connections are there, and everything arrives."""
        for link in self.links.values():
            link.is_up, link.is_held = True, False
        self.go_on()
        self.pump()

    def behind(self) -> dict[int, int]:
        """Events that followers have not heard yet, of those that are behind."""
        num_applied = [len(shard.applied) for shard in self.shards]
        return {shard: num_applied[0] - num for shard, num in enumerate(num_applied) if num < num_applied[0]}

    def check(self) -> None:
        """Followers have done the same as the coordinator."""
        for number, shard in enumerate(self.shards) if self.is_checked else ():
            both = zip(shard.applied, self.shards[0].applied, strict=False)
            new = islice(both, self._num_checked[number], None)
            self._num_checked[number] = len(shard.applied)
            for (event, mine), (other, theirs) in new:
                assert repr(event) == repr(other), f"shard {number}"  # a loss may be NaN
                assert [_shown(item) for item in mine] == [_shown(item) for item in theirs], (
                    f"shard {number} at {event}"
                )
            if len(shard.applied) == len(self.shards[0].applied):
                assert shard.run.digest() == self.run.digest(), f"shard {number}"


def _shown(effect: effects.Effect) -> tuple[str, Any]:
    """For comparing: errors are equal when they say the same."""
    return repr(effect), getattr(effect, "saved", None)


def scattered(chance: random.Random, shards: Shards) -> None:
    """One message somewhere arrives, or is sent, or a connection breaks off and is made again."""
    link = chance.choice(list(shards.links.values()))
    way = chance.choice(link.ways)
    way.send()
    if chance.random() < 0.1:
        for item in link.ways:
            item.cut()
    else:
        way.deliver()
