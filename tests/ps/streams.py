"""Workers that say what they are told to say, to the real service and run, over streams in memory.

The streams stand in for gRPC alone. Nothing here takes time: when every coroutine has had its turns,
whoever still waits waits for ever.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc
import grpc.aio
import torch

from paramserver.common.config.schema import Config
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec, as_bytes, new_payload
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec, TableSpec
from paramserver.common.wire.frames import frame, message_frames, parse
from paramserver.common.wire.protocol import layout_to_proto, optimizer_to_proto
from paramserver.common.wire.segments import Segment, new_segment, open_segment
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.engine.engine import Engine
from paramserver.ps.engine.modes import make_policy
from paramserver.ps.wire.service import ParameterServerService

from ..records import contribution_proto

SMALL = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (8,))])
# Too large for inline work: the tensor thread runs, and replies come from another thread.
LARGE = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (100_000,))])


class Aborted(Exception):
    """What grpc's abort raises; carries the reason."""

    def __init__(self, reason: str, *texts: str) -> None:
        super().__init__(reason)
        self.texts = texts  # what people read, and what they can do


class Stream:
    """One worker's end and the server's end of a stream."""

    def __init__(self) -> None:
        self.to_server: asyncio.Queue[Any] = asyncio.Queue()
        self.received: list[Any] = []

    # The server's end.

    async def read(self) -> Any:
        return await self.to_server.get()

    async def write(self, raw: bytes) -> None:
        self.received.append(parse(pb.ServerMessage, bytes(raw)))

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    async def abort(self, code: grpc.StatusCode, details: str, metadata: Any) -> None:
        raise Aborted(dict(metadata)["ps-reason"], details, dict(metadata).get("ps-fix", ""))

    # The worker's end.

    def send(self, *raws: bytes) -> None:
        for raw in raws:
            self.to_server.put_nowait(raw)

    def close(self) -> None:
        self.to_server.put_nowait(grpc.aio.EOF)


class Worker:
    """A worker that says what it is told to say."""

    def __init__(self, server: Server, rank: int) -> None:
        self.layout = server.layout
        self.stream = Stream()
        self.rank = rank
        self.segment: Segment | None = None
        self.task = asyncio.ensure_future(server.service.exchange(None, self.stream))
        server.calls.append(self.task)

    async def join(
        self,
        offered: pb.Segment | None = None,
        reply_codec: str = "",
        codecs: Sequence[str] = (),
        optimizer: str = "SGD",
        contribution: int = 0,
        tables: Sequence[TableSpec] = (),
        join: pb.Join | None = None,
        settle: Callable[[], Coroutine[Any, Any, None]] | None = None,
        **more: Any,
    ) -> None:
        names = tuple(spec.name for spec in self.layout.specs if spec.kind is Kind.PARAMETER)
        spec = OptimizerSpec(optimizer, (GroupSpec(names, {"lr": 0.5, **more}),), tuple(tables))
        model = pb.Model(
            tensors=layout_to_proto(self.layout),
            fingerprint=self.layout.fingerprint,
            optimizer=optimizer_to_proto(spec),
            segment=offered,
            reply_codec=reply_codec,
            codecs=codecs,
            contribution=contribution,
            rendezvous="127.0.0.1:1",  # of workers that average among themselves
        )
        joining = frame(pb.WorkerMessage(join=join or pb.Join(rank=self.rank)))
        self.stream.send(joining, frame(pb.WorkerMessage(model=model)))
        await (settle or turns)()
        if self.kinds[-1] == "send_weights":
            weights = self.initial_weights()
            header = pb.WorkerMessage(initial_weights=pb.InitialWeights(payload_bytes=weights.numel()))
            self.stream.send(*message_frames(header, [as_bytes(weights)]))
            await turns()

    def initial_weights(self) -> torch.Tensor:
        return new_payload(self.layout.total_bytes).zero_()

    async def share(self) -> None:
        """Join with a segment of its own."""
        self.segment = new_segment(self.layout.exchange_bytes)
        await self.join(self.segment.address)

    def send(self, **fields: Any) -> None:
        self.stream.send(pb.WorkerMessage(**fields).SerializeToString())

    def begin(self, **fields: Any) -> None:
        self.send(begin=pb.Begin(**{"num_bytes": self.layout.exchange_bytes, **fields}))

    def tell(self, kind: str, payload: bytes, size: int, **fields: Any) -> None:
        """State messages of this kind with pieces of `size`."""
        for offset in range(0, len(payload), size):
            piece = {"num_bytes": len(payload), "offset": offset, "piece": payload[offset : offset + size], **fields}
            self.send(**{kind: pb.State(**piece)})

    def continue_(self, seq: int = 1, **fields: Any) -> None:
        """Announce a contribution whose payload is a partial transfer."""
        self.begin(continues=seq, **fields)
        self.announce(seq, **fields)

    def piece(self, offset: int, num_bytes: int, value: float = 1.0) -> None:
        values = torch.full((num_bytes // 4,), value)
        self.stream.send(frame(None, offset, [as_bytes(values)]))

    def write_to_segment(self, seq: int = 1, value: float = 1.0) -> None:
        """A contribution in the worker's segment."""
        assert self.segment is not None
        self.segment.payload.view(torch.float32).fill_(value)
        self.announce(seq, in_shared_memory=True)
        self.send(out_of_band=self.layout.exchange_bytes)

    def weights(self) -> torch.Tensor:
        """What came with the last reply, from wherever it lies."""
        at = max(index for index, received in enumerate(self.stream.received) if received.kind in ("reply", "final"))
        reply = self.stream.received[at]
        payload = new_payload(reply.header.weights.num_bytes)
        segment = None
        if reply.header.weights.HasField("segment"):
            segment = open_segment(reply.header.weights.segment)
        for received in self.stream.received[at:]:
            start, end = received.offset, received.offset + (received.out_of_band or len(received.data))
            as_bytes(payload)[start:end] = segment.bytes[start:end] if received.out_of_band else received.data
        return payload.view(torch.float32)

    def announce(self, seq: int = 1, **fields: Any) -> None:
        """The header of a contribution; its bytes do not come yet."""
        self.stream.send(frame(self.header(seq, **fields)))

    def contribute(self, seq: int = 1, value: float = 1.0, **fields: Any) -> None:
        payload = new_payload(self.layout.exchange_bytes)
        payload.view(torch.float32).fill_(value)
        self.stream.send(*message_frames(self.header(seq, **fields), [as_bytes(payload)]))

    def send_encoded(self, seq: int, data: bytes, **fields: Any) -> None:
        self.stream.send(*message_frames(self.header(seq, **fields), [memoryview(data)]))

    def header(self, seq: int, **fields: Any) -> pb.WorkerMessage:
        values = {
            "seq": seq, "num_samples": 1, "wants_weights": True, "num_bytes": self.layout.exchange_bytes, **fields
        }  # fmt: skip
        return pb.WorkerMessage(contribution=contribution_proto(**values))

    @property
    def kinds(self) -> list[str | None]:
        return [received.kind for received in self.stream.received]

    @property
    def outcomes(self) -> list[str]:
        return [pb.Reply.Outcome.Name(r.header.result.outcome) for r in self.stream.received if r.kind == "reply"]

    async def end(self) -> str:
        """How the call ended: 'ok', 'cancelled', or the reason of the refusal."""
        await turns()
        assert self.task.done(), "the call does not end"
        if self.task.cancelled():
            return "cancelled"
        error = self.task.exception()
        if error is None:
            return "ok"
        assert isinstance(error, Aborted), repr(error)
        return str(error)


class Server:
    def __init__(self, layout: Layout, max_staged: int, sections: dict[str, dict[str, Any]], **run: Any) -> None:
        self.layout = layout
        self.calls: list[asyncio.Task[None]] = []
        config = Config.model_validate({
            "run": {"mode": "sync", **run}, "server": {"max_staged": max_staged}, **sections,
        })  # fmt: skip
        self.engine = Engine(config, make_policy(config), name="run")
        self.service = ParameterServerService(self.engine)

    async def workers(self, count: int) -> list[Worker]:
        workers = [Worker(self, rank) for rank in range(count)]
        for worker in workers:
            await worker.join()
        await self.settle()
        assert all(worker.outcomes == ["START"] for worker in workers)
        return workers

    async def settle(self) -> None:
        """Until every coroutine and the tensor thread have done what they can."""
        num_quiet = 0
        while num_quiet < 4:
            await turns()
            num_quiet = 0 if self.engine.tensors._num_pending else num_quiet + 1
            await self.engine.tensors.run(lambda: None)

    def check_no_memory_is_kept(self) -> None:
        num_lent = self.engine.model.staging.num_lent
        assert num_lent == 0, f"{num_lent} payloads are lent to nobody"

    def check_nobody_reads(self) -> None:
        publisher = self.engine.model.publisher
        assert not publisher._used, "a version is read by nobody, and kept"
        assert publisher.latest.num_readers == 0


async def turns(count: int = 60) -> None:
    """More turns of the event loop than any chain of coroutines here needs."""
    for _ in range(count):
        await asyncio.sleep(0)


def served(
    layout: Layout = SMALL,
    max_staged: int = 1,
    store: dict[str, Any] | None = None,
    policy: dict[str, Any] | None = None,
    log: dict[str, Any] | None = None,
    **run: Any,
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Run the test on a server of its own, its first argument, whose calls end with it."""

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def play(**arguments: Any) -> None:
            async def main() -> None:
                sections = {"store": store or {}, "policy": policy or {}, "log": log or {}}
                server = Server(layout, max_staged, sections, **run)
                try:
                    await test(server, **arguments)
                finally:
                    for call in server.calls:
                        call.cancel()
                    await asyncio.gather(*server.calls, return_exceptions=True)
                    server.engine.tensors.close()
                    if server.engine.finished.done():
                        server.engine.finished.exception()

            asyncio.run(main())

        _, *others = inspect.signature(test).parameters.values()
        play.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]  # what pytest gives
        return play

    return decorate


def weight_of(server: Server) -> float:
    """All weights are the same; they began at 0, and a step is half of the gradient."""
    tensor = server.engine.model.store.tensors()["w"]
    assert torch.equal(tensor, torch.full_like(tensor, tensor[0].item()))
    return tensor[0].item()
