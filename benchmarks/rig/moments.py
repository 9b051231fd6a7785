"""When what happened in a worker's exchanges with its first shard: the calls that send and receive are watched."""

from __future__ import annotations

import time
from typing import Any, NamedTuple


class Moments(NamedTuple):
    """The times of one exchange, in perf_counter seconds."""

    begun: float
    sent: float  # encoded and given to the connection
    replied: float  # the reply has come, its weights have not
    done: float
    gate_wait_s: float  # as in Reply


class Watch:
    """On a session with a server (`worker/api.py`); `last` is of the last exchange that was not interrupted."""

    def __init__(self, session: Any) -> None:
        self.last: Moments | None = None
        exchange, shard = session._exchange, session._exchange.shards.first
        contribute, send, expect = exchange.contribute, shard.up.contribute, shard.expect
        sent = replied = 0.0

        def timed_send(*contribution: Any) -> None:
            nonlocal sent
            send(*contribution)
            sent = time.perf_counter()

        def timed_expect(*kinds: str) -> Any:
            nonlocal replied
            received = expect(*kinds)
            replied = time.perf_counter()
            return received

        def timed_contribute(outgoing: Any) -> Any:
            begun = time.perf_counter()
            reply = contribute(outgoing)
            self.last = Moments(begun, sent, replied, time.perf_counter(), reply.result.gate_wait_s)
            return reply

        exchange.contribute, shard.up.contribute, shard.expect = timed_contribute, timed_send, timed_expect
