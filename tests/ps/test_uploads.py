"""Uploads through the real service and run, over streams in memory: no way of failing may keep memory or a round.

The streams stand in for gRPC alone. Nothing here takes time: when every coroutine has had its turns,
whoever still waits waits for ever.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest
import torch

from paramserver.common.config import Config
from paramserver.common.layout import Kind, Layout, TensorSpec, as_bytes, new_body
from paramserver.common.optimizers import GroupSpec, OptimizerSpec
from paramserver.common.protocol import layout_to_proto, optimizer_to_proto, struct
from paramserver.common.wire import frame, message_frames, parse
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.run import Run
from paramserver.ps.server import make_policy
from paramserver.ps.service import ParameterServerService

SMALL = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (8,))])
# Too large for inline work: the tensor thread runs, and answers come from another thread.
LARGE = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (100_000,))])


class Aborted(Exception):
    """What grpc's abort raises; carries the reason."""


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

    async def abort(self, code: grpc.StatusCode, details: str, metadata: Any) -> None:
        raise Aborted(dict(metadata)["ps-reason"])

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
        self.task = asyncio.ensure_future(server.service.exchange(None, self.stream))
        server.calls.append(self.task)

    async def join(self) -> None:
        spec = OptimizerSpec("SGD", (GroupSpec(("w",), {"lr": 0.5}),))
        model = pb.Model(
            tensors=layout_to_proto(self.layout),
            fingerprint=self.layout.fingerprint,
            optimizer=optimizer_to_proto(spec),
        )
        self.stream.send(frame(pb.WorkerMessage(join=pb.Join(rank=self.rank))), frame(pb.WorkerMessage(model=model)))
        await turns()
        if self.kinds[-1] == "send_weights":
            weights = new_body(self.layout.total_bytes)
            header = pb.WorkerMessage(initial_weights=pb.InitialWeights(body_bytes=weights.numel()))
            self.stream.send(*message_frames(header, [as_bytes(weights)]))
            await turns()

    def announce(self, step: int = 1, **fields: Any) -> None:
        """The header of a contribution; its bytes do not come yet."""
        self.stream.send(frame(self._header(step, **fields)))

    def contribute(self, step: int = 1, value: float = 1.0, **fields: Any) -> None:
        body = new_body(self.layout.exchange_bytes)
        body.view(torch.float32).fill_(value)
        self.stream.send(*message_frames(self._header(step, **fields), [as_bytes(body)]))

    def _header(self, step: int, **fields: Any) -> pb.WorkerMessage:
        values = {
            "step": step, "num_samples": 1, "wants_weights": True, "body_bytes": self.layout.exchange_bytes, **fields
        }  # fmt: skip
        return pb.WorkerMessage(contribution=pb.Contribution(**values))

    @property
    def kinds(self) -> list[str | None]:
        return [received.kind for received in self.stream.received]

    @property
    def outcomes(self) -> list[str]:
        return [pb.Answer.Outcome.Name(r.header.outcome) for r in self.stream.received if r.kind == "answer"]

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
    def __init__(self, layout: Layout, max_staged: int, **run: Any) -> None:
        self.layout = layout
        self.calls: list[asyncio.Task[None]] = []
        config = Config.model_validate({
            "run": {"mode": "sync", **run}, "server": {"max_staged": max_staged},
        })  # fmt: skip
        self.run = Run(config, make_policy(config))
        self.service = ParameterServerService(self.run, config)

    async def workers(self, count: int) -> list[Worker]:
        workers = [Worker(self, rank) for rank in range(count)]
        for worker in workers:
            await worker.join()
        await self.settle()
        assert all(worker.outcomes == ["START"] for worker in workers)
        return workers

    async def settle(self) -> None:
        """Until every coroutine and the tensor thread have done what they can."""
        for _ in range(4):
            await turns()
            await self.run.tensors.run(lambda: None)

    def check_no_memory_is_kept(self) -> None:
        assert self.run.staging.num_lent == 0, f"{self.run.staging.num_lent} bodies are lent to nobody"


async def turns(count: int = 60) -> None:
    """More turns of the event loop than any chain of coroutines here needs."""
    for _ in range(count):
        await asyncio.sleep(0)


def served(
    layout: Layout = SMALL, max_staged: int = 1, **run: Any
) -> Callable[[Callable[[Server], Coroutine[Any, Any, None]]], Callable[[], None]]:
    """Run the test on a server of its own, whose calls end with it."""

    def decorate(test: Callable[[Server], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        def play() -> None:
            async def main() -> None:
                server = Server(layout, max_staged, **run)
                try:
                    await test(server)
                finally:
                    for call in server.calls:
                        call.cancel()
                    await asyncio.gather(*server.calls, return_exceptions=True)
                    server.run.tensors.close()
                    if server.run.finished.done():
                        server.run.finished.exception()

            asyncio.run(main())

        play.__name__, play.__doc__ = test.__name__, test.__doc__
        return play

    return decorate


# ---- the order of uploads ----------------------------------------------------------------------


@served(max_staged=1, workers=3)
async def test_uploads_wait_for_their_turn(server: Server) -> None:
    """With memory for one, rank 2's bytes stay with it until ranks 0 and 1 are folded."""
    workers = await server.workers(3)
    for worker in reversed(workers):
        worker.contribute()
        await turns()
        assert server.run.staging.num_lent <= 1
    assert [worker.outcomes for worker in workers] == [["START", "APPLIED"]] * 3
    assert server.run.policy.version == 1
    server.check_no_memory_is_kept()


@served(max_staged=1, workers=2)
async def test_who_is_folded_first_goes_without_contributing(server: Server) -> None:
    """Rank 1 waits for memory behind rank 0; rank 0 is killed while it computes: rank 1 is next, at once."""
    first, second = await server.workers(2)
    second.contribute()
    await turns()
    assert server.run.policy.version == 0
    first.stream.close()
    await turns()
    assert server.run.policy.version == 1, "nobody else is live, and the round does not close"
    assert second.outcomes == ["START", "APPLIED"]


@served(max_staged=2, workers=5)
async def test_all_that_are_folded_first_go(server: Server) -> None:
    *others, last = await server.workers(5)
    last.contribute()
    await turns()
    for worker in others:
        worker.stream.close()
        await turns()
    assert last.outcomes == ["START", "APPLIED"]


@served(max_staged=1, workers=2)
async def test_a_worker_dies_in_the_middle_of_its_upload(server: Server) -> None:
    first, second = await server.workers(2)
    first.announce()
    second.contribute()
    await turns()
    assert server.run.staging.num_lent == 1
    first.stream.close()
    await turns()
    assert await first.end() == "ok"
    assert second.outcomes == ["START", "APPLIED"], "the memory of the dead upload is not used again"
    server.check_no_memory_is_kept()


@served(max_staged=1, workers=2)
async def test_a_worker_is_replaced_in_the_middle_of_its_upload(server: Server) -> None:
    """The older process hangs and keeps its connection; the newer one must not wait for its memory."""
    old, other = await server.workers(2)
    old.announce()
    await turns()
    new = Worker(server, 0)
    await new.join()
    assert new.outcomes == ["START"]
    assert await old.end() == "REPLACED"
    server.check_no_memory_is_kept()
    new.contribute()
    other.contribute()
    await turns()
    assert new.outcomes == other.outcomes == ["START", "APPLIED"]


@served(max_staged=1, workers=3)
async def test_a_worker_dies_while_it_waits_for_memory(server: Server) -> None:
    first, second, third = await server.workers(3)
    for worker in (second, third):
        worker.announce()
    await turns()
    second.task.cancel()
    await turns()
    assert await second.end() == "cancelled"
    first.contribute()
    third.stream.send(frame(None, 0, [memoryview(bytes(SMALL.exchange_bytes))]))
    await turns()
    assert third.outcomes == ["START", "APPLIED"]
    server.check_no_memory_is_kept()


@pytest.mark.parametrize("num_turns", range(8))
def test_a_connection_is_lost_in_the_moment_of_getting_memory(num_turns: int) -> None:
    """Memory becomes free, and before the waiting call has run again, it is cancelled."""

    @served(max_staged=1, workers=3)
    async def play(server: Server) -> None:
        first, second, third = await server.workers(3)
        second.announce()
        await turns()
        first.contribute()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        second.task.cancel()
        await turns()
        assert await second.end() == "cancelled"
        server.check_no_memory_is_kept()
        third.contribute()
        await turns()
        assert third.outcomes == ["START", "APPLIED"]

    play()


# ---- contributions that are not taken -------------------------------------------------------------


@served(max_staged=2, workers=2)
async def test_every_refused_upload_gives_its_memory_back(server: Server) -> None:
    wrong = [
        {"body_bytes": 2**40},
        {"body_bytes": 0},
        {"num_samples": 0},
        {"num_samples": 2**63},
        {"codec": "nonsense"},
        {"step": 7},
    ]
    _, other = await server.workers(2)
    for fields in wrong:
        worker = Worker(server, 0)  # replaces the one before
        await worker.join()
        worker.contribute(**fields)
        await turns()
        assert await worker.end() == ("STEP_GAP" if "step" in fields else "BAD_REQUEST"), fields
        server.check_no_memory_is_kept()
    assert other.outcomes == ["START"]


@pytest.mark.parametrize("lr", [math.nan, math.inf, "fast", None, [0.1], {}], ids=repr)
def test_a_learning_rate_that_is_none(lr: Any) -> None:
    """A broken schedule of one worker is its own problem: refused, and nobody else notices."""

    @served(max_staged=1, workers=2)
    async def play(server: Server) -> None:
        broken, other = await server.workers(2)
        other.contribute()
        broken.contribute(hyperparameters=[struct({"lr": lr})])
        await turns()
        assert not server.run.finished.done(), f"the run ended: {server.run.finished.exception()!r}"
        assert await broken.end() == "BAD_REQUEST"
        server.check_no_memory_is_kept()
        assert other.outcomes == ["START", "APPLIED"]
        assert bool(torch.isfinite(server.run.store.tensors()["w"]).all())

    play()


@pytest.mark.parametrize(
    "pieces",
    [
        [(1, 8)],
        [(0, 8), (0, 8)],
        [(0, 8), (16, 8)],
        [(0, 33)],
        [(2**63, 8)],
        [(0, 8), (8, 0)],
    ],
)
def test_pieces_that_do_not_fit(pieces: list[tuple[int, int]]) -> None:
    @served(max_staged=1, workers=2)
    async def play(server: Server) -> None:
        broken, other = await server.workers(2)
        broken.announce()
        broken.stream.send(*[frame(None, offset, [memoryview(bytes(size))]) for offset, size in pieces if size])
        if pieces[-1][1] == 0:
            broken.stream.send(frame(None, pieces[-1][0]))
        await turns()
        assert await broken.end() == "BAD_REQUEST"
        server.check_no_memory_is_kept()
        other.contribute()
        await turns()
        assert other.outcomes == ["START", "APPLIED"]

    play()


@served(max_staged=1, workers=2)
async def test_a_contribution_with_nan_is_answered_and_not_folded(server: Server) -> None:
    broken, other = await server.workers(2)
    broken.contribute(value=math.nan)
    await turns()
    assert broken.outcomes == ["START", "REJECTED"]
    server.check_no_memory_is_kept()
    broken.contribute(value=3.0)
    other.contribute(value=1.0)
    await turns()
    assert broken.outcomes == ["START", "REJECTED", "APPLIED"]
    assert torch.equal(server.run.store.tensors()["w"], torch.full((8,), -1.0))


# ---- the tensor thread ------------------------------------------------------------------------------


@served(layout=LARGE, max_staged=1, workers=2)
async def test_a_connection_is_lost_while_its_contribution_is_looked_at(server: Server) -> None:
    """The upload is whole, the tensor thread is busy, the worker is killed: its memory comes back."""
    first, second = await server.workers(2)
    is_busy, go_on = threading.Event(), threading.Event()
    server.run.tensors.submit(lambda: (is_busy.set(), go_on.wait(10)))
    await asyncio.to_thread(is_busy.wait, 10)
    first.contribute()
    await turns()
    assert server.run.staging.num_lent == 1
    first.task.cancel()
    await turns()
    go_on.set()
    assert await first.end() == "cancelled"
    second.contribute()
    await server.settle()
    assert server.run.policy.version == 1
    server.check_no_memory_is_kept()


@served(layout=LARGE, max_staged=1, workers=2)
async def test_a_worker_is_replaced_while_its_contribution_is_looked_at(server: Server) -> None:
    """Whole, but not accepted yet: the newer process begins at the same step, and nothing is folded twice."""
    old, other = await server.workers(2)
    is_busy, go_on = threading.Event(), threading.Event()
    server.run.tensors.submit(lambda: (is_busy.set(), go_on.wait(10)))
    await asyncio.to_thread(is_busy.wait, 10)
    old.contribute(value=100.0)
    await turns()
    new = Worker(server, 0)
    await new.join()
    go_on.set()
    await server.settle()
    assert await old.end() == "REPLACED"
    server.check_no_memory_is_kept()
    for worker in (other, new):
        worker.contribute(value=1.0)
        await server.settle()
    assert new.outcomes == other.outcomes == ["START", "APPLIED"]
    assert torch.equal(server.run.store.tensors()["w"], torch.full((100_000,), -0.5))
