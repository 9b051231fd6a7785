"""What is to happen when, of one simulated run: a heap of things that take a known time, and the shared links."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
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
        self.is_stopped = False
        self._links = links
        self._heap: list[tuple[float, int, Handler, Worker, int, Any]] = []
        self._num_pushed = 0

    def push(self, at: float, handler: Handler, worker: Worker, told: Any = None) -> None:
        """Call it then, unless the worker has another life by that time."""
        self._num_pushed = num = self._num_pushed + 1
        heappush(self._heap, (at, num, handler, worker, worker.life, told))

    def go_on(self, until: float) -> None:
        """Things happen, up to that moment, or until it is stopped."""
        heap, (item, other) = self._heap, self._links
        while not self.is_stopped:
            link = item if item.next_end < other.next_end else other
            link_at = link.next_end
            if heap and heap[0][0] < link_at:
                if heap[0][0] >= until:
                    return
                self.now, _, handler, worker, life, told = heappop(heap)
            elif link_at < until:
                self.now = link_at
                worker, life, handler, told = link.end()
            else:
                return
            if worker.life == life:
                handler(worker, told)

    @property
    def is_empty(self) -> bool:
        """Nothing will happen."""
        item, other = self._links
        return not self._heap and item.next_end == other.next_end == math.inf
