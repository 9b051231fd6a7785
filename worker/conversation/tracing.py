"""Records a worker's spans: `exchange` with the children `encode`, `wait` and `apply`.

`encode` ends when the bytes are handed over, `wait` when the reply starts to arrive, and `apply` when the model has the
weights. The spans are recorded after the exchange. This file is imported only with `output.traces`.
"""

from __future__ import annotations

import time

from ...common.config.option import WORKER
from ...common.wire.records import ContributionId, Result
from ...common.wire.tracing import Traces, ids_of


class ExchangeTraces:
    """The spans of one worker. Threads of several shards record their parts."""

    def __init__(self, url: str, rank: int | None) -> None:
        self._traces = Traces(url, WORKER, **({} if rank is None else {"paramserver.rank": rank}))
        self._run, self._id, self._begun = "", ContributionId(0, 0, 0), 0
        self._sent: list[int] = []
        self._came: list[int] = []

    def begin(self, run: str, contribution: ContributionId) -> None:
        """The exchange of this contribution begins, or begins again."""
        self._run, self._id, self._begun = run, contribution, time.time_ns()
        self._sent, self._came = [], []

    def sent(self) -> None:
        """A shard's part was handed over."""
        self._sent.append(time.time_ns())

    def came(self) -> None:
        """A shard's reply starts to arrive."""
        self._came.append(time.time_ns())

    def end(self, result: Result) -> None:
        """The complete reply has arrived: record the spans."""
        ended = time.time_ns()
        sent = max(self._sent, default=self._begun)
        came = max(sent, max(self._came, default=ended))
        rank, _, seq = self._id
        about = {"paramserver.rank": rank, "paramserver.number": seq, "paramserver.outcome": result.outcome.name}
        parent = self._traces.exchange(ids_of(self._run, *self._id), self._begun, ended, about)
        self._traces.below(parent, "encode", self._begun, sent)
        self._traces.below(parent, "wait", sent, came, {"paramserver.gate_wait_s": result.gate_wait_s})
        self._traces.below(parent, "apply", came, ended)

    def close(self) -> None:
        self._traces.close()
