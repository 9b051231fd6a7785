"""What becomes of NaN, Inf and norms beyond the cap, from a worker's stream to the weights."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.codecs.base import decode_payload
from paramserver.common.errors import ParamServerError
from paramserver.common.registry import CODECS
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec, as_bytes
from paramserver.common.wire.frames import message_frames
from paramserver.proto import parameter_server_pb2 as pb

from ..streams import LARGE, SMALL, Server, Worker, served, weight_of

# Of 8 or of 100,000 elements: looked at inline, and part by part on the tensor thread.

SIZES = pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["inline", "large"])


def counters(server: Server, rank: int) -> tuple[int, int, int, int]:
    row = server.engine.run.roster.stats[rank]
    return server.engine.run.policy.steps_done(rank), row.rejected, row.skipped, row.clipped


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
        reply = [received.header for received in broken.stream.received if received.kind == "reply"][-1]
        assert reply.result.seq == 1
        assert (
            "NaN or Inf in 'w' (store.on_nonfinite is skip): counted as a contribution, nothing folded"
            in reply.result.reason
        )
        assert (weight_of(server), server.engine.run.policy.version) == (-1.5, 1)
        for worker in (broken, other):
            worker.contribute(seq=2, version=1)
        await server.settle()
        assert broken.outcomes == ["START", "REJECTED", "APPLIED"]
        assert (weight_of(server), counters(server, 0), counters(server, 1)) == (-2.0, (2, 0, 1, 0), (2, 0, 0, 0))
        server.check_no_memory_is_kept()

    play()


@served(workers=1, mode="async", store={"on_nonfinite": "skip"})
async def test_a_repeat_of_a_skipped_contribution_says_so_again(server: Server) -> None:
    (worker,) = await server.workers(1)
    worker.contribute(value=math.nan)
    await server.settle()
    worker.send(ask_again=pb.AskAgain(seq=1))
    await server.settle()
    assert worker.outcomes == ["START", "REJECTED", "REJECTED"]
    worker.contribute(seq=2, version=1)
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
                payload = torch.full((num_elements,), value, dtype=torch.bfloat16)
                header = worker.header(step, codec="bf16", num_bytes=2 * num_elements)
                worker.stream.send(*message_frames(header, [as_bytes(payload)]))
            await server.settle()
        assert worker.outcomes == ["START"] + ["APPLIED"] * 3
        assert weight_of(server) == pytest.approx(-0.125 - 0.25 - 0.125, abs=1e-4)
        assert counters(server, 0) == (3, 0, 0, 1)

    play()


@pytest.mark.parametrize("name", CODECS.names())
@pytest.mark.parametrize("rows", [2, 70])
def test_spoiled_bytes_of_any_codec_cost_one_contribution(name: str, rows: int) -> None:
    """NaN for scales and values, places beyond a chunk, places twice, a payload that is shorter than it must be; whole
    in a message, and in pieces."""
    matrix = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (rows, 4096))])
    codec = CODECS.load(name)()
    sound = torch.zeros(codec.encoded_bytes(matrix), dtype=torch.uint8)
    codec.encoder(matrix).begin(torch.ones(rows * 4096).view(torch.uint8), sound)

    @served(layout=matrix, workers=1, mode="sync" if codec.name == "onebit_adam" else "async")
    async def play(server: Server) -> None:
        worker = Worker(server, 0)
        await worker.join(codecs=[name], optimizer="OneBitAdam" if codec.name == "onebit_adam" else "SGD")
        await server.settle()
        for sent in (torch.full_like(sound, 255), sound):
            header = worker.header(1, codec=name, num_bytes=len(sent))
            worker.stream.send(*message_frames(header, [as_bytes(sent)]))
            await server.settle()
        assert worker.outcomes == ["START", "REJECTED", "APPLIED"]
        reasons = [message.header.result.reason for message in worker.stream.received if message.kind == "reply"]
        assert name != "topk" or "codec 'topk' cannot decode" in reasons[1], "places that do not ascend"
        weights = server.engine.model.store.weights.view(torch.float32)
        assert weights.isfinite().all() and weights.any()
        header = worker.header(2, codec=name, num_bytes=len(sound) - 4)
        worker.stream.send(*message_frames(header, [as_bytes(sound[4:])]))
        await server.settle()
        assert await worker.end() == "BAD_REQUEST"
        server.check_no_memory_is_kept()

    play()


@pytest.mark.parametrize("name", [name for name in CODECS.names() if CODECS.load(name).has_feedback])
@given(seed=st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_a_few_spoiled_bytes_are_decoded_or_refused(name: str, seed: int) -> None:
    """And what is decoded is looked through as all is: nothing is written elsewhere, and nothing fails otherwise."""
    matrix, generator = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (2, 4100))]), torch.Generator()
    codec, payload = CODECS.load(name)(), torch.full((matrix.total_bytes + 64,), 7, dtype=torch.uint8)
    sent = torch.zeros(codec.encoded_bytes(matrix), dtype=torch.uint8)
    codec.encoder(matrix).begin(torch.randn(8200, generator=generator.manual_seed(seed)).view(torch.uint8), sent)
    for position in torch.randint(len(sent), (1 + seed % 9,), generator=generator).tolist():
        sent[position] = int(torch.randint(256, (), generator=generator))
    with suppress(ParamServerError):
        decode_payload(codec, matrix, sent, payload)
    assert (payload[matrix.total_bytes :] == 7).all()


@served(layout=LARGE, workers=1, mode="async", store={"max_norm": 1.0})
async def test_a_gradient_is_clipped_in_the_workers_segment(server: Server) -> None:
    worker = Worker(server, 0)
    await worker.share()
    worker.write_to_segment(value=7.0)
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
        assert ("contribution 1" if on_large == "halt" else "3 contributions") in message
        assert await worker.end() == "DIVERGED"

    play()


@served(workers=2, store={"on_nonfinite": "halt"})
async def test_the_first_nan_is_the_end_of_the_run(server: Server) -> None:
    broken, other = await server.workers(2)
    other.contribute()
    broken.contribute(value=math.nan)
    await server.settle()
    message = str(server.engine.finished.exception())
    assert "rank 0 sent NaN or Inf in 'w' as its contribution 1 (store.on_nonfinite is halt)" in message
    assert [await worker.end() for worker in (broken, other)] == ["DIVERGED"] * 2
    assert server.engine.run.roster.workers == {}
    assert server.engine.run.policy.version == 0, "a round was closed by the departure of who ended the run"
