"""The agenda of one simulated run: a heap of events with known times, and the shared links."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from ..machines.links import Link
from .worker import Worker

# A handler gets the worker and the item that was pushed with it.
Handler = Callable[[Worker, Any], None]
# Worker, its life, the handler of the end, and its item.
Transfers = Link[tuple[Worker, int, Handler, Any]]


class Agenda:
    """`now` is the virtual time, in seconds."""

    def __init__(self, links: tuple[Transfers, Transfers]) -> None:
        self.now = 0.0
        self.is_stopped = False
        self._links = links
        self._heap: list[tuple[float, int, Handler, Worker, int, Any]] = []
        self._num_pushed = 0

    def push(self, at: float, handler: Handler, worker: Worker, item: Any = None) -> None:
        """Call the handler at that time, unless the worker has another life by then."""
        self._num_pushed = num = self._num_pushed + 1
        heappush(self._heap, (at, num, handler, worker, worker.life, item))

    def go_on(self, until: float) -> None:
        """Handle events up to that time, or until it is stopped."""
        heap, (up, down) = self._heap, self._links
        while not self.is_stopped:
            link = up if up.next_end < down.next_end else down
            link_at = link.next_end
            if heap and heap[0][0] < link_at:
                if heap[0][0] >= until:
                    return
                self.now, _, handler, worker, life, item = heappop(heap)
            elif link_at < until:
                self.now = link_at
                worker, life, handler, item = link.end()
            else:
                return
            if worker.life == life:
                handler(worker, item)

    @property
    def is_empty(self) -> bool:
        """Whether no event is left."""
        return not self._heap and all(link.next_end == math.inf for link in self._links)
