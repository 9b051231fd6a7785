"""Spans of the server, as children of the workers' exchange spans (`common/wire/tracing.py`).

`contribution` lasts from its arrival until its reply is sent. Its child `wait` is the time for which the mode made it
wait. `apply` lasts until its version is computed. With several shards, only the coordinator traces.
"""

from __future__ import annotations

import time
from typing import Any

from ...common.config.option import SERVER
from ...common.wire.tracing import Traces, ids_of
from ..core.effects import Commit, ContributionTaken, Fact, SendReply
from ..engine.engine import Engine
from .bus import Sink

_MOST_OPEN = 10_000  # contributions without a reply; those of departed workers never get one


class TracingSink(Sink):
    """Records spans on the event loop, where tensor work reports its end. A thread of the SDK sends the spans."""

    name = "traces"
    kinds = (ContributionTaken, Commit, SendReply)

    def __init__(self, url: str) -> None:
        self._traces = Traces(url, SERVER)
        self._taken: dict[tuple[int, int, int], tuple[int, int]] = {}  # by contribution id: time in ns, base version

    def begin(self, engine: Engine) -> None:
        self._run, self._tensors, self._now = engine.run, engine.tensors, engine.now
        self._unix_s = time.time() - engine.now()  # offset of Unix time to a fact's time

    def take(self, at: float, fact: Fact) -> None:
        now = self._ns(at)
        if isinstance(fact, ContributionTaken):
            if len(self._taken) >= _MOST_OPEN:
                self._taken.clear()
            self._taken[fact.contribution.id] = now, fact.contribution.base.version
        elif isinstance(fact, Commit):
            self._tensors.submit(lambda: None, lambda _: self._made(fact, now))
        elif isinstance(fact, SendReply):
            self._replied(fact, now)

    def _ns(self, at: float) -> int:
        return int((at + self._unix_s) * 1e9)

    def _made(self, commit: Commit, begun: int) -> None:
        """Record the spans of a version whose tensor work is done."""
        ended = self._ns(self._now())
        for rank, incarnation, seq in commit.contributions:
            parent = self._traces.of_others(ids_of(self._run.name, rank, incarnation, seq))
            self._traces.below(parent, "apply", begun, ended, {"paramserver.version": commit.version}, kind="SERVER")

    def _replied(self, reply: SendReply, now: int) -> None:
        result = reply.reply.result
        found = self._taken.pop((reply.rank, reply.incarnation, result.seq), None)
        if found is None:
            return  # a START, or a reply that is sent again
        taken, base_version = found
        about: dict[str, Any] = {
            "paramserver.rank": reply.rank,
            "paramserver.number": result.seq,
            "paramserver.outcome": result.outcome.name,
            "paramserver.base_version": base_version,
            "paramserver.version": result.version,
            "paramserver.staleness": result.staleness,
        }
        parent = self._traces.of_others(ids_of(self._run.name, reply.rank, reply.incarnation, result.seq))
        span = self._traces.below(parent, "contribution", taken, now, about, kind="SERVER")
        if result.gate_wait_s > 0:
            self._traces.below(span, "wait", now - int(result.gate_wait_s * 1e9), now)

    def close(self) -> None:
        self._traces.close()
