"""A large message over a slow link takes longer than limits.progress_s."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

from paramserver.common.config.sections.processes import LimitsConfig
from paramserver.common.wire.direct import OUT_OF_BAND_BYTES, OutOfBand
from paramserver.common.wire.frames import out_of_band_frame
from paramserver.ps.wire.stream import Stream, Watchdog

from .test_direct_connection import MB, over_tcp

PROGRESS_S = 0.5


async def test_a_reply_that_is_read_slowly_is_sent_to_its_end() -> None:
    connection, peer = over_tcp()
    watch, context = Watchdog(), cast(Any, None)  # a direct connection replaces the context
    stream = Stream(context, LimitsConfig(progress_s=PROGRESS_S), watch)
    stream.direct = connection
    began = time.monotonic()

    def read() -> int:
        num_bytes = 0
        while more := peer.recv(MB):
            num_bytes += len(more)
            time.sleep(len(more) / (8 * MB))
        return num_bytes

    reading = asyncio.ensure_future(asyncio.to_thread(read))
    frame = out_of_band_frame(0, OUT_OF_BAND_BYTES)
    await stream.write(OutOfBand(frame, [memoryview(bytes(OUT_OF_BAND_BYTES))]))
    try:
        await stream.flush()
    finally:
        took_s = time.monotonic() - began
        watch.remove(stream)
        connection.close()
    assert await reading > OUT_OF_BAND_BYTES
    peer.close()
    assert took_s > PROGRESS_S, "the link was not slow"
