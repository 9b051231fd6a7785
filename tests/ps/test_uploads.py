"""Uploads through the real service and run, over streams in memory: no way of failing may keep memory or a round.

The streams stand in for gRPC alone. Nothing here takes time: when every coroutine has had its turns,
whoever still waits waits for ever.
"""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest
import torch

from paramserver.common.config.schema import Config
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec, as_bytes, new_body
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec
from paramserver.common.wire.frames import frame, message_frames, parse
from paramserver.common.wire.protocol import (
    layout_to_proto,
    optimizer_to_proto,
    struct,
)
from paramserver.common.wire.segments import Segment, SegmentError, new_segment, open_segment
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.engine.engine import Engine
from paramserver.ps.engine.modes import make_policy
from paramserver.ps.wire.service import ParameterServerService

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

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

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
        self.segment: Segment | None = None
        self.task = asyncio.ensure_future(server.service.exchange(None, self.stream))
        server.calls.append(self.task)

    async def join(self, offered: pb.Segment | None = None) -> None:
        spec = OptimizerSpec("SGD", (GroupSpec(("w",), {"lr": 0.5}),))
        model = pb.Model(
            tensors=layout_to_proto(self.layout),
            fingerprint=self.layout.fingerprint,
            optimizer=optimizer_to_proto(spec),
            segment=offered,
        )
        self.stream.send(frame(pb.WorkerMessage(join=pb.Join(rank=self.rank))), frame(pb.WorkerMessage(model=model)))
        await turns()
        if self.kinds[-1] == "send_weights":
            weights = new_body(self.layout.total_bytes)
            header = pb.WorkerMessage(initial_weights=pb.InitialWeights(body_bytes=weights.numel()))
            self.stream.send(*message_frames(header, [as_bytes(weights)]))
            await turns()

    async def share(self) -> None:
        """Join with a segment of its own."""
        self.segment = new_segment(self.layout.exchange_bytes)
        await self.join(self.segment.address)

    def send(self, **fields: Any) -> None:
        self.stream.send(pb.WorkerMessage(**fields).SerializeToString())

    def begin(self, **fields: Any) -> None:
        self.send(begin=pb.Begin(**{"body_bytes": self.layout.exchange_bytes, **fields}))

    def piece(self, offset: int, num_bytes: int, value: float = 1.0) -> None:
        values = torch.full((num_bytes // 4,), value)
        self.stream.send(frame(None, offset, [as_bytes(values)]))

    def place(self, step: int = 1, value: float = 1.0) -> None:
        """A contribution in the worker's segment."""
        assert self.segment is not None
        self.segment.body.view(torch.float32).fill_(value)
        self.announce(step, in_segment=True)
        self.send(placed=self.layout.exchange_bytes)

    def weights(self) -> torch.Tensor:
        """What came with the last answer, from wherever it lies."""
        at = max(index for index, received in enumerate(self.stream.received) if received.kind in ("answer", "final"))
        answer = self.stream.received[at]
        body = new_body(answer.header.body_bytes)
        segment = None
        if answer.header.HasField("segment"):
            segment = open_segment(answer.header.segment)
        for received in self.stream.received[at:]:
            start, end = received.offset, received.offset + (received.placed or len(received.data))
            as_bytes(body)[start:end] = segment.bytes[start:end] if received.placed else received.data
        return body.view(torch.float32)

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
    def __init__(self, layout: Layout, max_staged: int, sections: dict[str, dict[str, Any]], **run: Any) -> None:
        self.layout = layout
        self.calls: list[asyncio.Task[None]] = []
        config = Config.model_validate({
            "run": {"mode": "sync", **run}, "server": {"max_staged": max_staged}, **sections,
        })  # fmt: skip
        self.engine = Engine(config, make_policy(config), name="run")
        self.service = ParameterServerService(self.engine, config)

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
            await self.engine.tensors.run(lambda: None)

    def check_no_memory_is_kept(self) -> None:
        num_lent = self.engine.model.staging.num_lent
        assert num_lent == 0, f"{num_lent} bodies are lent to nobody"

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
    **run: Any,
) -> Callable[[Callable[[Server], Coroutine[Any, Any, None]]], Callable[[], None]]:
    """Run the test on a server of its own, whose calls end with it."""

    def decorate(test: Callable[[Server], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        def play() -> None:
            async def main() -> None:
                server = Server(layout, max_staged, {"store": store or {}, "policy": policy or {}}, **run)
                try:
                    await test(server)
                finally:
                    for call in server.calls:
                        call.cancel()
                    await asyncio.gather(*server.calls, return_exceptions=True)
                    server.engine.tensors.close()
                    if server.engine.finished.done():
                        server.engine.finished.exception()

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
        assert server.engine.model.staging.num_lent <= 1
    assert [worker.outcomes for worker in workers] == [["START", "APPLIED"]] * 3
    assert server.engine.run.policy.version == 1
    server.check_no_memory_is_kept()


@served(max_staged=1, workers=2)
async def test_who_is_folded_first_goes_without_contributing(server: Server) -> None:
    """Rank 1 waits for memory behind rank 0; rank 0 is killed while it computes: rank 1 is next, at once."""
    first, second = await server.workers(2)
    second.contribute()
    await turns()
    assert server.engine.run.policy.version == 0
    first.stream.close()
    await turns()
    assert server.engine.run.policy.version == 1, "nobody else is live, and the round does not close"
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
    assert server.engine.model.staging.num_lent == 1
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
        assert not server.engine.finished.done(), f"the run ended: {server.engine.finished.exception()!r}"
        assert await broken.end() == "BAD_REQUEST"
        server.check_no_memory_is_kept()
        assert other.outcomes == ["START", "APPLIED"]
        assert bool(torch.isfinite(server.engine.model.store.tensors()["w"]).all())

    play()


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 8), (0, 8)],
        [(8, 8), (0, 9)],
        [(16, 8), (17, 1)],
        [(25, 8)],
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
    assert torch.equal(server.engine.model.store.tensors()["w"], torch.full((8,), -1.0))


# ---- contributions that are not sound ----------------------------------------------------------------
# Of 8 or of 100,000 elements: looked at inline, and part by part on the tensor thread.

SIZES = pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["inline", "large"])


def weight_of(server: Server) -> float:
    """All weights are the same; they began at 0, and a step is half of the gradient."""
    tensor = server.engine.model.store.tensors()["w"]
    assert torch.equal(tensor, torch.full_like(tensor, tensor[0].item()))
    return tensor[0].item()


def counters(server: Server, rank: int) -> tuple[int, int, int, int]:
    row = server.engine.run.roster.stats[rank].summary()
    return row.steps, row.rejected, row.skipped, row.clipped


@SIZES
def test_a_skipped_contribution_counts_and_is_not_folded(layout: Layout) -> None:
    """The round's mean is the other's alone, and the sender is told that its own is not in it."""

    @served(layout=layout, max_staged=2, workers=2, steps=3, store={"on_nonfinite": "skip"})
    async def play(server: Server) -> None:
        broken, other = await server.workers(2)
        broken.contribute(value=math.nan)
        other.contribute(value=3.0)
        await server.settle()
        assert broken.outcomes == ["START", "REJECTED"]
        assert other.outcomes == ["START", "APPLIED"]
        answer = [received.header for received in broken.stream.received if received.kind == "answer"][-1]
        assert answer.step == 1
        assert "NaN or Inf (store.on_nonfinite is skip): counted as a contribution, nothing folded" in answer.reason
        assert (weight_of(server), server.engine.run.policy.version) == (-1.5, 1)
        for worker in (broken, other):
            worker.contribute(step=2, base_version=1)
        await server.settle()
        assert broken.outcomes == ["START", "REJECTED", "APPLIED"]
        assert (weight_of(server), counters(server, 0), counters(server, 1)) == (-2.0, (2, 0, 1, 0), (2, 0, 0, 0))
        server.check_no_memory_is_kept()

    play()


@SIZES
def test_a_round_of_nothing_but_skipped_contributions(layout: Layout) -> None:
    """It is a round: a version with the same weights, after which everybody goes on."""

    @served(layout=layout, max_staged=1, workers=2, steps=2, store={"on_nonfinite": "skip"})
    async def play(server: Server) -> None:
        workers = await server.workers(2)
        for worker in workers:
            worker.contribute(value=math.inf)
        await server.settle()
        assert [worker.outcomes for worker in workers] == [["START", "REJECTED"]] * 2
        assert (weight_of(server), server.engine.run.policy.version, server.engine.model.store.version) == (0.0, 1, 1)
        assert bool((workers[0].weights() == 0).all())
        for worker in workers:
            worker.contribute(step=2, base_version=1)
        await server.settle()
        assert (weight_of(server), server.engine.run.policy.version) == (-0.5, 2)
        server.check_no_memory_is_kept()
        server.check_nobody_reads()

    play()


@served(workers=1, mode="async", store={"on_nonfinite": "skip"})
async def test_a_repeat_of_a_skipped_contribution_says_so_again(server: Server) -> None:
    (worker,) = await server.workers(1)
    worker.contribute(value=math.nan)
    await server.settle()
    worker.announce(1, repeat=True, body_bytes=0)
    await server.settle()
    assert worker.outcomes == ["START", "REJECTED", "REJECTED"]
    worker.contribute(step=2, base_version=1)
    await server.settle()
    assert worker.outcomes[-1] == "APPLIED"
    assert (weight_of(server), counters(server, 0)) == (-0.5, (2, 0, 1, 0))


@SIZES
@pytest.mark.parametrize("codec", ["raw", "bf16"])
def test_a_gradient_beyond_the_cap_is_scaled_down_to_it(layout: Layout, codec: str) -> None:
    num_elements = layout.exchange_bytes // 4
    cap = 0.5 * math.sqrt(num_elements)  # the norm of a gradient of 0.5 everywhere

    @served(layout=layout, workers=1, mode="async", store={"max_norm": cap})
    async def play(server: Server) -> None:
        (worker,) = await server.workers(1)
        for step, value in enumerate([0.25, 100.0, 0.25], start=1):
            if codec == "raw":
                worker.contribute(step, value)
            else:
                body = torch.full((num_elements,), value, dtype=torch.bfloat16)
                header = worker._header(step, codec="bf16", body_bytes=2 * num_elements)
                worker.stream.send(*message_frames(header, [as_bytes(body)]))
            await server.settle()
        assert worker.outcomes == ["START"] + ["APPLIED"] * 3
        assert weight_of(server) == pytest.approx(-0.125 - 0.25 - 0.125, abs=1e-4)
        assert counters(server, 0) == (3, 0, 0, 1)

    play()


@served(layout=LARGE, workers=1, mode="async", store={"max_norm": 1.0})
async def test_a_gradient_is_clipped_in_the_workers_segment(server: Server) -> None:
    worker = Worker(server, 0)
    await worker.share()
    worker.place(value=7.0)
    await server.settle()
    assert torch.linalg.vector_norm(worker.weights()).item() == pytest.approx(0.5, rel=1e-4)


@SIZES
@pytest.mark.parametrize("on_large", ["reject", "skip", "halt"])
def test_a_gradient_beyond_the_cap(layout: Layout, on_large: str) -> None:
    @served(layout=layout, workers=1, mode="async", store={"max_norm": 1.0, "on_large": on_large, "max_nonfinite": 3})
    async def play(server: Server) -> None:
        (worker,) = await server.workers(1)
        worker.contribute(value=7.0)
        await server.settle()
        assert (weight_of(server), server.engine.finished.done()) == (0.0, on_large == "halt")
        server.check_no_memory_is_kept()
        if on_large == "skip":
            assert (worker.outcomes, counters(server, 0)) == (["START", "REJECTED"], (1, 0, 1, 0))
            return
        assert counters(server, 0) == (0, 1, 0, 0)
        if on_large == "reject":
            for _ in range(2):
                assert worker.outcomes[-1] == "REJECTED"
                worker.contribute(value=7.0)
                await server.settle()
        message = str(server.engine.finished.exception())
        assert server.engine.finished.exception().exit_code == 16
        for word in ("rank 0", f"norm {7 * math.sqrt(layout.exchange_bytes / 4):.4g}", "store.max_norm is 1"):
            assert word in message
        assert ("step 1" if on_large == "halt" else "3 contributions") in message
        assert await worker.end() == "DIVERGED"

    play()


@served(workers=2, store={"on_nonfinite": "halt"})
async def test_the_first_nan_is_the_end_of_the_run(server: Server) -> None:
    broken, other = await server.workers(2)
    other.contribute()
    broken.contribute(value=math.nan)
    await server.settle()
    message = str(server.engine.finished.exception())
    assert "rank 0 sent NaN or Inf as its contribution 1 (store.on_nonfinite is halt)" in message
    assert [await worker.end() for worker in (broken, other)] == ["DIVERGED"] * 2
    assert server.engine.run.roster.workers == {}
    assert server.engine.run.policy.version == 0, "a round was closed by the departure of who ended the run"


@pytest.mark.parametrize("shares", [False, True], ids=["tcp", "segments"])
def test_a_median_holds_every_workers_gradient_to_the_commit(shares: bool) -> None:
    """More than may be staged at once: what is folded leaves the staging memory, and comes back to it."""

    @served(layout=LARGE, max_staged=1, workers=5, steps=2, policy={"aggregation": "median"})
    async def play(server: Server) -> None:
        workers = [Worker(server, rank) for rank in range(5)]
        for worker in workers:
            await (worker.share() if shares else worker.join())
        await server.settle()
        for step in (1, 2):
            for worker, value in zip(workers, [1.0, -900.0, 2.0, 3.0, 900.0], strict=True):
                if shares:
                    worker.segment.body.view(torch.float32).fill_(value)
                    worker.announce(step, in_segment=True, base_version=step - 1)
                    worker.send(placed=LARGE.exchange_bytes)
                else:
                    worker.contribute(step, value, base_version=step - 1)
                await server.settle()
            assert all(worker.outcomes == ["START"] + ["APPLIED"] * step for worker in workers)
            assert weight_of(server) == -1.0 * step
            server.check_no_memory_is_kept()
            for worker in workers:
                if shares:
                    worker.send(taken=pb.Taken())
            await server.settle()
        assert len(server.engine.model.staging._bytes) <= (0 if shares else 6)

    play()


# ---- the tensor thread ------------------------------------------------------------------------------


@served(layout=LARGE, max_staged=1, workers=2)
async def test_a_connection_is_lost_while_its_contribution_is_looked_at(server: Server) -> None:
    """The upload is whole, the tensor thread is busy, the worker is killed: its memory comes back."""
    first, second = await server.workers(2)
    is_busy, go_on = threading.Event(), threading.Event()
    server.engine.tensors.submit(lambda: (is_busy.set(), go_on.wait(10)))
    await asyncio.to_thread(is_busy.wait, 10)
    first.contribute()
    await turns()
    assert server.engine.model.staging.num_lent == 1
    first.task.cancel()
    await turns()
    go_on.set()
    assert await first.end() == "cancelled"
    second.contribute()
    await server.settle()
    assert server.engine.run.policy.version == 1
    server.check_no_memory_is_kept()


@served(layout=LARGE, max_staged=1, workers=2)
async def test_a_worker_is_replaced_while_its_contribution_is_looked_at(server: Server) -> None:
    """Whole, but not accepted yet: the newer process begins at the same step, and nothing is folded twice."""
    old, other = await server.workers(2)
    is_busy, go_on = threading.Event(), threading.Event()
    server.engine.tensors.submit(lambda: (is_busy.set(), go_on.wait(10)))
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
    assert torch.equal(server.engine.model.store.tensors()["w"], torch.full((100_000,), -0.5))


# ---- shared memory ----------------------------------------------------------------------------------


@served(layout=LARGE, max_staged=1, workers=1, mode="async")
async def test_a_contribution_in_the_workers_segment(server: Server) -> None:
    """Neither memory of the server nor a copy is needed, and the weights are read where they are made."""
    worker = Worker(server, 0)
    await worker.share()
    for step in range(1, 10):
        worker.place(step)
        await server.settle()
        assert worker.stream.received[-1].placed, "the weights came over the connection"
        assert torch.equal(worker.weights(), torch.full((100_000,), -0.5 * step))
        worker.send(taken=pb.Taken())
    await turns()
    server.check_nobody_reads()
    server.check_no_memory_is_kept()
    assert server.engine.model.publisher.num_memories == 1, "nobody read while another version was made"


@served(layout=LARGE, max_staged=1, workers=1, mode="async")
async def test_a_worker_that_never_says_what_it_has_taken(server: Server) -> None:
    """Its next contribution says so too, or is refused; it must not use up the versions that may be on their way."""
    worker = Worker(server, 0)
    await worker.share()
    for step in range(1, 10):
        worker.place(step)
        await server.settle()
        if worker.task.done():
            break
        assert worker.outcomes == ["START"] + ["APPLIED"] * step
    worker.stream.close()
    await turns()
    server.check_nobody_reads()


@served(layout=LARGE, max_staged=1, workers=2, mode="async")
async def test_taken_when_nothing_was_given(server: Server) -> None:
    worker, other = await server.workers(2)
    for _ in range(3):
        worker.send(taken=pb.Taken())
    worker.announce()
    worker.send(taken=pb.Taken())
    worker.piece(0, LARGE.exchange_bytes)
    await server.settle()
    assert worker.outcomes == ["START", "APPLIED"]
    other.contribute()
    await server.settle()
    server.check_nobody_reads()
    assert server.engine.run.policy.version == 2


def test_no_more_shared_memory_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then weights go over the connection, to workers that offered a segment too, version after version."""

    @served(layout=LARGE, max_staged=1, workers=1, mode="async")
    async def play(server: Server) -> None:
        worker = Worker(server, 0)
        await worker.share()
        for step in range(1, 10):
            worker.place(step)
            await server.settle()
            assert worker.outcomes == ["START"] + ["APPLIED"] * step, f"stuck at step {step}"
            assert torch.equal(worker.weights(), torch.full((100_000,), -0.5 * step))
        server.check_nobody_reads()

    def refuse(num_bytes: int) -> Segment:
        raise SegmentError("none left")

    monkeypatch.setattr("paramserver.ps.tensors.model.new_segment", refuse)
    play()


@served(layout=LARGE, max_staged=2, workers=3, mode="async")
async def test_while_a_worker_reads_others_go_on(server: Server) -> None:
    """It reads one version all the time; the others' commits write elsewhere, in two memories by turns."""
    reader, *others = (Worker(server, rank) for rank in range(3))
    for worker in (reader, *others):
        await worker.share()
    reader.place()
    await server.settle()
    held = reader.weights().clone()
    for step in range(1, 6):
        for worker in others:
            worker.place(step)
            await server.settle()
            worker.send(taken=pb.Taken())
            await turns()
    assert torch.equal(reader.weights(), held), "what it reads has changed"
    assert server.engine.model.publisher.num_memories == 2
    reader.task.cancel()
    await turns()
    server.check_nobody_reads()
    assert torch.equal(others[1].weights(), torch.full((100_000,), -0.5 * 11))


@served(layout=LARGE, max_staged=1, workers=2)
async def test_a_worker_dies_while_it_places_its_contribution(server: Server) -> None:
    victim, other = Worker(server, 0), Worker(server, 1)
    await victim.share()
    await other.share()
    other.place()
    victim.announce(in_segment=True)
    victim.send(placed=4000, offset=8000)
    await turns()
    victim.task.cancel()
    await server.settle()
    assert other.outcomes == ["START", "APPLIED"]
    assert torch.equal(other.weights(), torch.full((100_000,), -0.5))


@served(layout=LARGE, max_staged=1, workers=2)
async def test_a_mean_stands_though_its_first_worker_is_gone(server: Server) -> None:
    """Its segment became the mean of the round: the server's mapping outlives the worker."""
    victim, other = Worker(server, 0), Worker(server, 1)
    await victim.share()
    await other.share()
    victim.place(value=1.0)
    await server.settle()
    victim.segment = None
    victim.stream.close()
    victim.task.cancel()
    await turns()
    other.place(value=3.0)
    await server.settle()
    assert torch.equal(other.weights(), torch.full((100_000,), -1.0))


@served(layout=LARGE, max_staged=1, workers=1, mode="async")
async def test_a_rank_that_comes_back_without_a_segment_is_shown_without(server: Server) -> None:
    first = Worker(server, 0)
    await first.share()
    assert server.engine.traffic[0].lane == "shared memory"
    second = Worker(server, 0)
    await second.join()
    assert server.engine.traffic[0].lane == "tcp"
    second.contribute()
    await server.settle()
    assert not second.stream.received[-1].placed
    assert torch.equal(second.weights(), torch.full((100_000,), -0.5))


def _spoil(address: pb.Segment, **changes: Any) -> pb.Segment:
    return pb.Segment(**{field.name: value for field, value in address.ListFields()} | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": 1},
        {"pid": 0},
        {"pid": 2**32 - 1},
        {"descriptor": 0},
        {"descriptor": 2**32 - 1},
        {"label": "../../../../etc/passwd"},
        {"label": "0" * 32},
        {"label": ""},
        {"label": "A" * 32},
        {"host": ""},
        {"host": "another"},
        {"num_bytes": 0},
        {"num_bytes": 2**63},
        {"num_bytes": 399_999},
    ],
    ids=str,
)
def test_an_offer_that_cannot_be_opened(changes: dict[str, Any]) -> None:
    """The worker is told why, and takes part over the connection."""

    @served(layout=LARGE, max_staged=1, workers=1, mode="async")
    async def play(server: Server) -> None:
        worker = Worker(server, 0)
        segment = new_segment(LARGE.exchange_bytes)
        assert segment.address is not None
        await worker.join(_spoil(segment.address, **changes))
        verdict = worker.stream.received[1]
        assert verdict.kind == "shared_memory"
        assert not verdict.header.accepted
        assert verdict.header.reason
        worker.contribute()
        await server.settle()
        assert worker.outcomes == ["START", "APPLIED"]
        assert server.engine.traffic[0].lane == "tcp"
        worker.announce(2, in_segment=True)
        await turns()
        assert await worker.end() == "BAD_REQUEST"
        server.check_no_memory_is_kept()

    play()


@served(layout=LARGE, max_staged=1, workers=1, mode="async")
async def test_a_segment_larger_than_a_contribution_will_do(server: Server) -> None:
    """As the proto says: at least as large."""
    worker = Worker(server, 0)
    segment = new_segment(LARGE.exchange_bytes + 4096)
    segment.body[: LARGE.exchange_bytes].view(torch.float32).fill_(1.0)
    await worker.join(segment.address)
    assert worker.stream.received[1].header.accepted, worker.stream.received[1].header.reason
    worker.announce(in_segment=True)
    worker.send(placed=LARGE.exchange_bytes)
    await server.settle()
    assert torch.equal(worker.weights(), torch.full((100_000,), -0.5))


# ---- an upload that begins before its facts are known ------------------------------------------------


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
@pytest.mark.parametrize("num_before", range(5))
def test_pieces_before_and_after_the_contribution(order: list[int], num_before: int) -> None:
    @served(layout=LARGE, max_staged=1, workers=1, mode="async")
    async def play(server: Server) -> None:
        (worker,) = await server.workers(1)
        worker.begin()
        for index, quarter in enumerate([*order, -1]):
            if index == num_before:
                worker.announce()
            if quarter >= 0:
                await turns()
                worker.piece(100_000 * quarter, 100_000, value=float(quarter))
        await server.settle()
        assert worker.outcomes == ["START", "APPLIED"]
        assert worker.weights()[::25_000].tolist() == [0.0, -0.5, -1.0, -1.5]
        server.check_no_memory_is_kept()

    play()


@served(layout=LARGE, max_staged=1, workers=1, mode="async")
async def test_a_second_begin_forgets_the_first_attempt(server: Server) -> None:
    """Also that it held NaN, in a part that had been looked through."""
    (worker,) = await server.workers(1)
    for value in (math.nan, 5.0, math.inf):
        worker.begin()
        worker.piece(0, 400_000 if math.isnan(value) else 4000, value)
        await server.settle()
    worker.begin()
    worker.announce()
    worker.piece(0, 400_000, 1.0)
    await server.settle()
    assert worker.outcomes == ["START", "APPLIED"]
    assert torch.equal(worker.weights(), torch.full((100_000,), -0.5))
    server.check_no_memory_is_kept()


def _end_begun(worker: Worker, how: str) -> None:
    match how:
        case "leave":
            worker.send(leave=pb.Leave())
        case "stream ends":
            worker.stream.close()
        case "cancelled":
            worker.task.cancel()
        case "another codec":
            worker.announce(codec="bf16", body_bytes=LARGE.exchange_bytes // 2)
        case "another size":
            worker.announce(body_bytes=4)
        case "a bad size again":
            worker.begin(body_bytes=2**40)
        case "in a segment that is not":
            worker.announce(in_segment=True)
        case "begun in another way":
            worker.begin(codec="bf16", body_bytes=LARGE.exchange_bytes // 2)
        case "the same piece":
            worker.piece(0, 4000)
        case "placed":
            worker.send(placed=400, offset=8000)
        case "no samples":
            worker.announce(num_samples=0)
        case "another step":
            worker.announce(step=7)
            worker.piece(4000, 396_000)
        case "two contributions":
            worker.announce()
            worker.announce()
        case "begin after contribution":
            worker.announce()
            worker.begin()


BEGUN_ENDS = {
    "leave": "ok",
    "stream ends": "ok",
    "cancelled": "cancelled",
    "another codec": "BAD_REQUEST",
    "another size": "BAD_REQUEST",
    "a bad size again": "BAD_REQUEST",
    "in a segment that is not": "BAD_REQUEST",
    "begun in another way": "BAD_REQUEST",
    "the same piece": "BAD_REQUEST",
    "placed": "BAD_REQUEST",
    "no samples": "BAD_REQUEST",
    "another step": "STEP_GAP",
    "two contributions": "BAD_REQUEST",
    "begin after contribution": "BAD_REQUEST",
}


@pytest.mark.parametrize("how", BEGUN_ENDS)
@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_every_end_of_a_begun_upload_gives_its_memory_back_once(how: str, is_busy: bool) -> None:
    """Also while the tensor thread still looks through what had come."""

    @served(layout=LARGE, max_staged=1, workers=2)
    async def play(server: Server) -> None:
        broken, other = await server.workers(2)
        go_on = threading.Event()
        if is_busy:
            server.engine.tensors.submit(lambda: go_on.wait(10))
        broken.begin()
        broken.piece(0, 4000)
        await turns()
        assert server.engine.model.staging.num_lent == 1
        _end_begun(broken, how)
        await turns()
        go_on.set()
        await server.settle()
        assert await broken.end() == BEGUN_ENDS[how]
        server.check_no_memory_is_kept()
        free = server.engine.model.staging._free
        assert len({id(body) for body in free}) == len(free) == 1
        other.contribute()
        await server.settle()
        assert other.outcomes == ["START", "APPLIED"]
        assert torch.equal(other.weights(), torch.full((100_000,), -0.5))

    play()


@served(layout=LARGE, max_staged=1, workers=1, steps=1, mode="async")
async def test_finish_after_a_begin_throws_the_upload_away(server: Server) -> None:
    (worker,) = await server.workers(1)
    worker.contribute()
    await server.settle()
    worker.begin()
    worker.piece(0, 4000)
    worker.send(finish=pb.Finish())
    await server.settle()
    server.check_no_memory_is_kept()
    assert worker.kinds[-1] in ("final", None)
    assert torch.equal(worker.weights(), torch.full((100_000,), -0.5))
    worker.send(leave=pb.Leave())
    await server.settle()
    assert await worker.end() == "ok"


@served(layout=LARGE, max_staged=1, workers=1, mode="async")
async def test_pieces_that_nothing_announced(server: Server) -> None:
    (worker,) = await server.workers(1)
    worker.piece(0, 4000)
    await turns()
    assert await worker.end() == "BAD_REQUEST"
    server.check_no_memory_is_kept()


@pytest.mark.parametrize("how", ["cancelled", "stream ends", "replaced", "killed while reading"])
def test_the_segment_of_a_worker_that_is_gone_is_let_go(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, not when the garbage collector comes by: it may be as large as the model."""

    opened: list[weakref.ref[Segment]] = []

    def open_and_note(address: pb.Segment) -> Segment:
        segment = open_segment(address)
        opened.append(weakref.ref(segment))
        return segment

    monkeypatch.setattr("paramserver.ps.wire.lanes.shared.open_segment", open_and_note)

    @served(layout=LARGE, max_staged=1, workers=1, mode="async")
    async def play(server: Server) -> None:
        worker = Worker(server, 0)
        await worker.share()
        worker.place()
        await server.settle()
        if how != "killed while reading":
            worker.send(taken=pb.Taken())
            worker.announce(2, in_segment=True)
            worker.send(placed=4000)
            await turns()
        match how:
            case "stream ends":
                worker.stream.close()
            case "replaced":
                await Worker(server, 0).join()
            case _:
                worker.task.cancel()
        await server.settle()
        assert worker.task.done()
        server.calls.remove(worker.task)
        del worker
        await server.settle()
        assert opened[0]() is None
        server.check_nobody_reads()

    gc.disable()
    try:
        play()
    finally:
        gc.enable()
