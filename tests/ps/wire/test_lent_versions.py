"""A version that was retained for a reply is given back, at whichever message its stream is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paramserver.common.registry import CODECS
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.common.wire.records import NextWork, Outcome, Reply, Result
from paramserver.ps.core import effects
from paramserver.ps.engine.folding import Go, Kept, Peer
from paramserver.ps.wire.delivery import Delivery, Transport
from paramserver.ps.wire.stream import StreamLost

from ..streams import Server, served

LARGE = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (600_000,))])
STATE = {"step": 0, "local_steps": 1}


class Breaking:
    """A stream that is lost at message number `at`."""

    bytes_written = 0

    def __init__(self, at: int, error: BaseException) -> None:
        self.num_left, self.error = at, error

    async def write(self, message: Any) -> None:
        if not self.num_left:
            raise self.error
        self.num_left -= 1

    say = write

    async def flush(self) -> None:
        """Nothing waits."""


@pytest.mark.parametrize("at", range(7))
@pytest.mark.parametrize("outcome", [Outcome.START, Outcome.APPLIED])
@pytest.mark.parametrize("codec", [None, "bf16"])
@pytest.mark.parametrize("error", [StreamLost, asyncio.CancelledError])
@served(layout=LARGE, workers=1, mode="async")
async def test_a_lost_stream_gives_its_version_back(
    server: Server, at: int, outcome: Outcome, codec: str | None, error: type[BaseException]
) -> None:
    """A START sends the state of the worker's script before its weights."""
    await server.workers(1)
    engine, model = server.engine, server.engine.model
    engine.folding.states.at = lambda rank, seq: Kept(STATE, b"x" * 10)  # type: ignore[method-assign,assignment]
    peer = Peer(0, 1, reply_codec=CODECS.load(codec)() if codec else None)
    stream: Any = Breaking(at, error())
    delivery = Delivery(engine, stream, peer, Transport(model, stream))
    reply = Reply(Result(outcome, 0, 0), NextWork(1, 0))
    effect = effects.SendReply(rank=0, incarnation=1, reply=reply, has_weights=True)
    publication = model.publisher.hold(peer.as_frames(effect))
    try:
        await delivery.reply(Go(effect, publication=publication))
    except error:
        assert not stream.num_left
    await server.settle()
    server.check_nobody_reads()
