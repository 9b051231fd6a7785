"""A codec with memory between a worker and the real service and run, over streams in memory, through every fault.

The worker's process is played with the codec's own objects; when an exchange is over both sides must hold the same
values, bit by bit, or the next payload would say so.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from paramserver.common.codecs.base import begin_payload, payload_bytes, take_payload
from paramserver.common.config.schema import Config
from paramserver.common.registry import CODECS
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec, as_bytes, new_payload
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec
from paramserver.common.wire.frames import frame, message_frames, parse
from paramserver.common.wire.protocol import layout_to_proto, optimizer_to_proto
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.core import events
from paramserver.ps.engine.engine import Engine
from paramserver.ps.engine.modes import make_policy
from paramserver.ps.wire.service import ParameterServerService

from ..records import contribution_proto

sys.path.insert(0, str(Path(__file__).parent / "added"))
from delta import DeltaCodec

SMALL = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (8,)), TensorSpec("b", Kind.BUFFER, "float32", (2,))])
# Too large for inline work: payloads come in pieces, and the tensor thread decodes them.
LARGE = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (100_000,))])
CODEC = DeltaCodec()
CAP = {SMALL.fingerprint: 12.0, LARGE.fingerprint: 1000.0}


@pytest.fixture(autouse=True)
def _delta_is_a_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("paramserver.common.codecs.delta")
    module.ENTRY = DeltaCodec  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(CODECS._modules, "delta", module.__name__)


class Stream:
    """Both ends of a stream."""

    def __init__(self) -> None:
        self.to_server: asyncio.Queue[Any] = asyncio.Queue()
        self.received: asyncio.Queue[Any] = asyncio.Queue()

    async def read(self) -> Any:
        raw = await self.to_server.get()
        if raw is None:
            raise ConnectionError
        return raw

    async def write(self, raw: bytes) -> None:
        self.received.put_nowait(parse(pb.ServerMessage, bytes(raw)))

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    async def abort(self, code: Any, details: str, metadata: Any) -> None:
        self.received.put_nowait(dict(metadata)["ps-reason"])
        raise ConnectionError


class Process:
    """A worker's process: what it remembers over its streams."""

    def __init__(self, service: ParameterServerService, layout: Layout, name: str) -> None:
        self.service, self.layout, self.name = service, layout, name
        self.encoder, self.decoder = CODEC.encoder(layout), CODEC.decoder(layout)
        self.num_taken = self.number = self.incarnation = self.server_incarnation = 0
        self.run = ""
        self.sent: torch.Tensor | None = None  # not replied yet
        self.calls: list[asyncio.Task[None]] = []

    async def join(self) -> bool:
        """On a new stream; whether it goes on where it was."""
        self.stream = Stream()
        self.calls.append(asyncio.ensure_future(self.service.exchange(None, self.stream)))
        join = pb.Join(
            run=self.run, rank=0, incarnation=self.incarnation, server_incarnation=self.server_incarnation,
            process=self.name, replies_taken=self.num_taken,
        )  # fmt: skip
        spec = OptimizerSpec("SGD", (GroupSpec(("w",), {"lr": 0.5}),))
        model = pb.Model(
            tensors=layout_to_proto(self.layout), fingerprint=self.layout.fingerprint,
            optimizer=optimizer_to_proto(spec), reply_codec="delta",
        )  # fmt: skip
        self._say(join=join)
        self._say(model=model)
        welcome = (await self._next("welcome")).header
        self.run, self.incarnation, self.server_incarnation = (
            welcome.run,
            welcome.incarnation,
            welcome.server_incarnation,
        )
        if welcome.resumed:
            self.counted = welcome.seq
            return True
        self.encoder, self.decoder, self.num_taken, self.sent = (
            CODEC.encoder(self.layout), CODEC.decoder(self.layout), 0, None,
        )  # fmt: skip
        received = await self._next("reply", "send_weights")
        if received.kind == "send_weights":
            weights = new_payload(self.layout.total_bytes)
            header = pb.WorkerMessage(initial_weights=pb.InitialWeights(payload_bytes=weights.numel()))
            self._send(message_frames(header, [as_bytes(weights)]))
            received = await self._next("reply")
        await self._payload(received)
        assert received.header.weights.codec == ""
        self.number = received.header.result.seq
        return False

    async def lose(self) -> None:
        """The stream breaks off, and is made again; what was not replied is sent again, or asked for."""
        self.stream.to_server.put_nowait(None)
        await asyncio.wait(self.calls)
        if not await self.join() or self.sent is None:
            return
        if self.counted > self.number:
            self._say(ask_again=pb.AskAgain(seq=self.counted))
        else:
            self.send()
        await self.take()

    def begin(self, gradient: torch.Tensor) -> None:
        payload = new_payload(self.layout.exchange_bytes)
        self.layout.runs_of(Kind.PARAMETER)[0].view(payload).copy_(gradient)
        self.sent = begin_payload(CODEC, self.encoder, self.layout, payload)

    def send(self, num_frames: int | None = None) -> None:
        assert self.sent is not None
        header = contribution_proto(
            self.number + 1, num_samples=1, wants_weights=True, codec="delta", num_bytes=len(self.sent)
        )
        frames = list(message_frames(pb.WorkerMessage(contribution=header), [as_bytes(self.sent)]))
        self._send(frames[:num_frames])

    async def take(self, break_off: bool = False) -> str:
        received = await self._next("reply")
        outcome = pb.Reply.Outcome.Name(received.header.result.outcome)
        payload = await self._payload(received)
        if break_off:
            return outcome
        assert received.header.weights.codec == "delta" and len(payload) == payload_bytes(CODEC, self.layout)
        self.encoder.commit() if outcome in ("APPLIED", "REPEATED") else self.encoder.rollback()
        self.sent, self.number = None, received.header.result.seq
        self.weights = new_payload(self.layout.exchange_bytes)
        take_payload(CODEC, self.decoder, self.layout, payload, self.weights)
        self.decoder.commit()
        self.num_taken += 1
        return outcome

    async def _payload(self, received: Any) -> torch.Tensor:
        payload = new_payload(received.header.weights.num_bytes)
        left = len(payload)
        while True:
            as_bytes(payload)[received.offset : received.offset + len(received.data)] = received.data
            left -= len(received.data)
            if not left:
                return payload
            received = await self._next(None)

    async def _next(self, *kinds: str | None) -> Any:
        while True:
            received = await asyncio.wait_for(self.stream.received.get(), 20)
            assert not isinstance(received, str), received
            if received.kind in kinds:
                return received
            assert received.kind == "waiting", received.kind

    def _say(self, **fields: Any) -> None:
        self._send([frame(pb.WorkerMessage(**fields))])

    def _send(self, frames: Any) -> None:
        for raw in frames:
            self.stream.to_server.put_nowait(raw)


def played(layout: Layout, test: Callable[[Engine, Process], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        config = Config.model_validate({
            "run": {"mode": "async", "workers": 1},
            "store": {"max_norm": CAP[layout.fingerprint], "on_large": "reject"},
        })  # fmt: skip
        engine = Engine(config, make_policy(config), name="run")
        engine.offer(events.HeartbeatBegan("p"))
        process = Process(ParameterServerService(engine, config), layout, "p")
        try:
            await process.join()
            await test(engine, process)
        finally:
            for call in process.calls:
                call.cancel()
            await asyncio.gather(*process.calls, return_exceptions=True)
            engine.tensors.close()
            if engine.finished.done():
                engine.finished.exception()

    asyncio.run(main())


def gradient_of(layout: Layout, seed: int) -> torch.Tensor:
    return torch.randn(layout.num_parameters, generator=torch.Generator().manual_seed(seed))


def check_agreement(engine: Engine, process: Process) -> None:
    memory: Any = engine.folding.memory_of(0)
    mine: Any = process.encoder
    assert torch.equal(mine.values[0], memory._decoders["delta"].values[0])
    theirs: Any = process.decoder
    # Of the reply just taken the server does not know yet.
    sent = memory._encoder._next if memory._encoder._next is not None else memory._encoder.values
    assert torch.equal(theirs.values[0], sent[0])
    assert engine.model.staging.num_lent == 0


FAULTS = ["none", "none", "cut on its way", "reply lost", "too large", "resend", "idle reset", "new process"]


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("seed", range(6))
def test_both_sides_remember_the_same_whatever_happens(layout: Layout, seed: int) -> None:
    order = torch.randint(len(FAULTS), (25,), generator=torch.Generator().manual_seed(seed)).tolist()

    async def test(engine: Engine, process: Process) -> None:
        folded = torch.zeros(layout.num_parameters)
        for step, index in enumerate(order):
            fault = FAULTS[index]
            if fault == "new process":  # or one whose lease had ended
                process.server_incarnation = 0
                await process.lose()
            elif fault == "idle reset":
                await process.lose()
            process.begin(gradient_of(layout, 100 * seed + step) * (30 if fault == "too large" else 0.5))
            encoder: Any = process.encoder
            begun = encoder._next[0].clone()
            outcome = "APPLIED"
            if fault == "cut on its way" and layout is LARGE:
                process.send(1)
                await process.lose()
            elif fault == "reply lost":
                process.send()
                await process.take(break_off=True)
                await process.lose()
            elif fault == "resend":  # the stream is lost before anything has left
                await process.lose()
            else:
                process.send()
                outcome = await process.take()
            assert outcome == ("REJECTED" if fault == "too large" else "APPLIED")
            await engine.tensors.run(lambda: None)
            check_agreement(engine, process)
            folded += begun if outcome == "APPLIED" else 0
        torch.testing.assert_close(
            engine.model.store.weights[: layout.parameter_bytes].view(torch.float32), -0.5 * folded
        )

    played(layout, test)


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
def test_what_cannot_be_decoded_is_the_workers_mistake_and_leaks_nothing(layout: Layout) -> None:
    async def test(engine: Engine, process: Process) -> None:
        process.begin(gradient_of(layout, 0))
        assert process.sent is not None
        process.sent[0] = 77  # as many payloads were never counted
        process.send()
        while not isinstance(received := await asyncio.wait_for(process.stream.received.get(), 20), str):
            pass
        assert received == "BAD_REQUEST"
        await asyncio.wait(process.calls)
        await engine.tensors.run(lambda: None)
        assert engine.model.staging.num_lent == 0
        assert not engine.finished.done()
        await process.join()  # the run goes on
        process.begin(gradient_of(layout, 1) * 0.5)
        process.send()
        assert await process.take() == "APPLIED"
        check_agreement(engine, process)

    played(layout, test)
