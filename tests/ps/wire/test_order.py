"""Weights travel in the order in which a worker says that it uses them."""

from __future__ import annotations

import pytest
import torch

from paramserver.common.tensors.layout import Kind, Layout, TensorSpec, as_bytes, new_body

from ..streams import Server, Worker, served

NUM = 300_000  # numbers in a tensor: no whole number of frames
LAYOUT = Layout([
    TensorSpec("last", Kind.PARAMETER, "float32", (NUM,)),
    TensorSpec("first", Kind.PARAMETER, "float32", (NUM,)),
    TensorSpec("middle", Kind.PARAMETER, "float32", (64,)),
])  # fmt: skip
LAST, FIRST, MIDDLE = (entry.offset for entry in LAYOUT.entries)


def contribute(worker: Worker, number: int, order: tuple[int, ...]) -> int:
    """How much had come before its answer."""
    worker.contribute(number, float(number), base_version=number - 1, order=order)
    return len(worker.stream.received)


def came(worker: Worker, num_seen: int) -> tuple[list[int], torch.Tensor]:
    """Where stretches of the body began, in the order in which they came; and the body."""
    starts, end, body = [], -1, new_body(LAYOUT.exchange_bytes)
    for one in worker.stream.received[num_seen:]:
        if len(one.data):
            as_bytes(body)[one.offset : one.offset + len(one.data)] = one.data
            starts += [one.offset] * (one.offset != end)
            end = one.offset + len(one.data)
    return starts, body


@served(layout=LAYOUT, max_staged=2, workers=2, mode="sync")
async def test_the_first_word_on_the_order_holds_for_all(server: Server) -> None:
    both = [Worker(server, rank) for rank in range(2)]
    for worker in both:
        await worker.join()
    await server.settle()
    said = [((), ()), ((), (MIDDLE, FIRST, LAST)), ((LAST,), (FIRST,))]
    expected = [[LAST], *[[MIDDLE, FIRST, LAST]] * 2]
    for number, (orders, starts) in enumerate(zip(said, expected, strict=True), start=1):
        seen = [contribute(*told) for told in zip(both, [number] * 2, orders, strict=True)]
        await server.settle()
        for worker, num_seen in zip(both, seen, strict=True):
            found, body = came(worker, num_seen)
            assert found == starts
            assert torch.equal(body, server.engine.model.store.weights)
    server.check_no_memory_is_kept()


@pytest.mark.parametrize("order", [(LAYOUT.exchange_bytes,), (0, 4, 8, 12), (1 << 63,)])
def test_what_is_no_order_is_refused(order: tuple[int, ...]) -> None:
    @served(layout=LAYOUT, max_staged=2, workers=1, mode="async")
    async def play(server: Server) -> None:
        worker = Worker(server, 0)
        await worker.join()
        await server.settle()
        contribute(worker, 1, order)
        assert await worker.end() == "BAD_REQUEST"
        server.check_no_memory_is_kept()

    play()
