"""A transport that is neither the stream nor shared memory: payloads go past the stream, straight into the tensors'
memory.

What a socket of its own would need, with lists in the place of the socket; the service and the run are the real ones.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from paramserver.common.codecs.base import Codec
from paramserver.common.tensors.layout import as_bytes
from paramserver.common.wire.frames import frame
from paramserver.common.wire.segments import new_segment
from paramserver.ps.tensors.replies.publication import Publication
from paramserver.ps.wire.transports import Header, Transport

from ..streams import LARGE, Server, Worker, served


class Direct(Transport):
    name = "direct"
    as_frames = False

    def __init__(self, *known: Any) -> None:
        super().__init__(*known)
        self.up: list[bytes] = []  # what the worker has sent
        self.down = bytearray()
        self.targets: list[int] = []  # where it came to lie

    def carries(self, codec: Codec) -> bool:
        return True

    async def fetch(self, target: memoryview) -> None:
        await asyncio.sleep(0)
        target[:] = self.up.pop(0)
        self.targets.append(torch.frombuffer(target, dtype=torch.uint8).data_ptr())

    async def send(self, header: Header, publication: Publication, num_bytes: int) -> None:
        self.reading = publication
        await self.stream.write(frame(header(publication.version, num_bytes, None)))
        async for start, end in publication.progress():
            self.down += publication.segment.bytes[start:end]
            await self.stream.write_out_of_band(start, end)
        self.taken()


@pytest.mark.parametrize("codec", ["raw", "bf16"])
def test_a_transport_brings_payloads_straight_to_where_they_belong(codec: str) -> None:
    @served(layout=LARGE, max_staged=1, workers=1, mode="async")
    async def play(server: Server) -> None:
        worker, transports = Worker(server, 0), []

        async def open_direct(known: Transport, *_: Any) -> tuple[Transport, str]:
            transports.append(Direct(known.model, known.stream))
            return transports[0], ""

        server.service._joining._probe.open = open_direct
        await worker.join(new_segment(LARGE.exchange_bytes).address)
        await server.settle()
        (transport,) = transports
        for step in (1, 2):
            payload = torch.full((100_000,), 1.0, dtype=torch.float32 if codec == "raw" else torch.bfloat16)
            raw = bytes(as_bytes(payload))
            middle = len(raw) // 2
            transport.up += [raw[middle:], raw[:middle]]
            worker.announce(step, codec=codec, num_bytes=len(raw), in_shared_memory=True)
            worker.send(out_of_band=middle, offset=middle)
            worker.send(out_of_band=middle, offset=0)
            await server.settle()
            assert torch.frombuffer(transport.down, dtype=torch.float32).tolist()[::50_000] == [-0.5 * step] * 2
            transport.down = bytearray()
        assert worker.outcomes == ["START", "APPLIED", "APPLIED"]
        assert server.engine.traffic[0].transport == "direct"
        if codec == "raw":
            (staged,) = server.engine.model.staging._bytes.values()
            first = torch.frombuffer(staged, dtype=torch.uint8).data_ptr()
            assert set(transport.targets) == {first, first + LARGE.exchange_bytes // 2}, "it was copied on the way"
        server.check_no_memory_is_kept()
        server.check_nobody_reads()

    play()
