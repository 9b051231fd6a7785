"""The agenda of one simulated run: events with known times, and the shared links.

A heap of 10,000 events costs more than the events. So events that come in the order of their times, such as those
after a constant delay, wait in queues instead.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from ...ps.core import events
from ..machines.links import Link
from ..machines.world import Compute, World


@dataclass(eq=False, slots=True)
class Worker:
    """The state of one rank. Times are virtual seconds."""

    rank: int
    compute: Compute
    incarnation: int = 0
    life: int = 0  # pushes and transfers of an older life are dropped
    counted: int = 0
    version: int = 0  # of its weights
    base: int = 0  # version of the current computation
    next_steps: int = 0  # local steps of the next contribution
    steps: int = 0  # of the current one
    done_steps: int = 0  # as if every sent contribution counts
    computed_s: float = 0.0
    is_computing: bool = False
    is_ready: bool = False  # computed, but the previous exchange is not over
    is_in_flight: bool = False
    is_staged: bool = False
    is_finished: bool = False
    event: events.Contributed | None = None  # sent last
    sent_at: float = 0.0
    begun_at: float = 0.0  # the upload
    decided_at: float = 0.0
    left_at: float = 0.0  # when the reply left the server
    transfer_s: float = 0.0  # of the last exchange
    num_sent: float = 0  # bytes
    num_received: float = 0


# A handler gets the worker and the item that was pushed with it.
Handler = Callable[[Worker, Any], None]
# Worker, its life, the handler of the end, and its item.
Transfers = Link[tuple[Worker, int, Handler, Any]]
# Time, number of the push, handler, worker, its life, and the item.
Event = tuple[float, int, Handler, Worker, int, Any]


class Agenda:
    """`now` is the virtual time, in seconds. What a transfer carries arrives `trip_s` after the transfer's end.

    An upload also takes the time that its worker adds (`Compute.exchange_s`)."""

    def __init__(self, world: World) -> None:
        self.now = 0.0
        self.is_stopped = False
        self.up: Transfers = Link(world.server_up)
        self.down: Transfers = Link(world.server_down)
        self.trip_s = world.latency_s / 2
        self._heap: list[Event] = []
        self.trips: deque[Event] = deque()  # ends of trips over the network, which all take as long
        self.works: deque[Event] = deque()  # ends of the server's tensor work, which is in order
        self._num_pushed = 0

    def push(self, at: float, handler: Handler, worker: Worker, item: Any = None) -> None:
        """Call the handler at that time, unless the worker has another life by then."""
        self._num_pushed = num = self._num_pushed + 1
        heappush(self._heap, (at, num, handler, worker, worker.life, item))

    def push_behind(self, queue: deque[Event], at: float, handler: Handler, worker: Worker, item: Any = None) -> None:
        """As `push`, into `trips` or `works`, whose events are mostly pushed in the order of their times."""
        if queue and at < queue[-1][0]:
            self.push(at, handler, worker, item)
            return
        self._num_pushed = num = self._num_pushed + 1
        queue.append((at, num, handler, worker, worker.life, item))

    def go_on(self, until: float) -> None:
        """Handle events up to that time, or until it is stopped."""
        heap, trips, works, up, down = self._heap, self.trips, self.works, self.up, self.down
        while not self.is_stopped:
            first: list[Event] | deque[Event] = heap
            if trips and (not first or trips[0] < first[0]):
                first = trips
            if works and (not first or works[0] < first[0]):
                first = works
            link = up if up.next_end < down.next_end else down
            link_at = link.next_end
            if first and first[0][0] < link_at:
                if first[0][0] >= until:
                    return
                self.now, _, handler, worker, life, item = heappop(heap) if first is heap else first.popleft()  # type: ignore[union-attr]
                if worker.life == life:
                    handler(worker, item)
            elif link_at < until:
                self.now = link_at
                worker, life, handler, item = link.end()
                if worker.life == life:
                    at = link_at + self.trip_s + (worker.compute.exchange_s if link is up else 0.0)
                    self.push_behind(trips, at, handler, worker, item)
            else:
                return

    @property
    def is_empty(self) -> bool:
        """Whether no event is left."""
        return not (self._heap or self.trips or self.works) and self.up.next_end == self.down.next_end == math.inf
