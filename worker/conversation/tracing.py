"""A worker's spans: `exchange` with `encode` (until its bytes are handed over), `wait` (until the reply begins to
come) and `apply` (until its weights are in the model). They are made when an exchange is over. Without `output.traces`
this file is not imported."""

from __future__ import annotations

import time
from typing import Any

from ...common.config.option import WORKER
from ...common.wire.tracing import Traces, ids_of


class ExchangeTraces:
    """The spans of one worker; threads of several shards mark their parts."""

    def __init__(self, url: str, rank: int | None) -> None:
        self._traces = Traces(url, WORKER, **({} if rank is None else {"paramserver.rank": rank}))
        self._begun = 0
        self._sent: list[int] = []
        self._came: list[int] = []

    def begin(self) -> None:
        """An exchange begins, for the first time or again."""
        self._begun = time.time_ns()
        self._sent, self._came = [], []

    def sent(self) -> None:
        """A shard's part is handed over."""
        self._sent.append(time.time_ns())

    def came(self) -> None:
        """A shard's reply begins to come."""
        self._came.append(time.time_ns())

    def end(self, run: str, rank: int, incarnation: int, number: int, gate_wait_s: float, outcome: str) -> None:
        """The reply is here, whole."""
        ended = time.time_ns()
        sent = max(self._sent, default=self._begun)
        came = max(sent, max(self._came, default=ended))
        about: dict[str, Any] = {"paramserver.rank": rank, "paramserver.number": number, "paramserver.outcome": outcome}
        ids = ids_of(run, rank, incarnation, number)
        above = self._traces.exchange(ids, self._begun, ended, about)
        self._traces.below(above, "encode", self._begun, sent)
        self._traces.below(above, "wait", sent, came, {"paramserver.gate_wait_s": gate_wait_s})
        self._traces.below(above, "apply", came, ended)

    def close(self) -> None:
        self._traces.close()
