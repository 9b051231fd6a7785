"""What is to happen when, of one simulated run: a heap of things that take a known time, and the shared links."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

from ..machines.links import Link
from .worker import Worker

# Told the worker and what was pushed with it.
Handler = Callable[[Worker, Any], None]
# A worker, in which of its lives, who is told of the end, and what.
Transfers = Link[tuple[Worker, int, Handler, Any]]


class Agenda:
    """`now` is the virtual time, in seconds."""

    def __init__(self, links: tuple[Transfers, Transfers]) -> None:
        self.now = 0.0
        self._links = links
        self._heap: list[tuple[float, int, Handler, Worker, int, Any]] = []
        self._num_pushed = 0

    def push(self, at: float, handler: Handler, worker: Worker, told: Any = None) -> None:
        """Call it then, unless the worker has another life by that time."""
        self._num_pushed = num = self._num_pushed + 1
        heapq.heappush(self._heap, (at, num, handler, worker, worker.life, told))

    @property
    def next_at(self) -> float:
        """When the next thing happens; infinity: never."""
        heap, (one, other) = self._heap, self._links
        at = heap[0][0] if heap else math.inf
        if one.next_end < at:
            at = one.next_end
        return other.next_end if other.next_end < at else at

    def step(self) -> None:
        """The next thing happens."""
        heap, (one, other) = self._heap, self._links
        link = one if one.next_end < other.next_end else other
        if heap and heap[0][0] < link.next_end:
            self.now, _, handler, worker, life, told = heapq.heappop(heap)
        else:
            self.now = link.next_end
            worker, life, handler, told = link.end()
        if worker.life == life:
            handler(worker, told)
