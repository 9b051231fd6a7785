"""Of a model in parts only what has changed travels: zeros stay with the worker, what no commit touched here."""

from __future__ import annotations

import random

import pytest
import torch

from paramserver.common.tensors.layout import Kind, Layout, TensorSpec, as_bytes, new_payload
from paramserver.common.wire.frames import frame, left_out_frame
from paramserver.common.wire.segments import open_segment
from paramserver.proto import parameter_server_pb2 as pb

from ..streams import Server, Worker, served

NUM = 600_000  # numbers in a part: no whole number of frames
PARTS = Layout([TensorSpec(name, Kind.PARAMETER, "float32", (NUM,)) for name in ("critic", "generator")])
BYTES = 4 * NUM


class Trainer:
    """A worker with the weights it has, which steps one part at a time."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.weights = new_payload(PARTS.exchange_bytes)
        self.base = self.number = self.num_left_out = 0
        self.num_seen = len(worker.stream.received)

    def contribute(self, part: int, has_base: bool = True, wants_weights: bool = True) -> None:
        self.number += 1
        fields = {"part": part + 1, "without_gradient": [1 - part], "has_all": has_base, "version": self.base}
        self.worker.announce(self.number, wants_weights=wants_weights, **fields)
        gradient = as_bytes(torch.full((NUM,), float(self.number)))
        self.worker.stream.send(left_out_frame((1 - part) * BYTES, BYTES))
        self.worker.stream.send(frame(None, part * BYTES, [gradient]))

    def take(self) -> None:
        """The reply, into what it has."""
        came, self.num_seen = self.worker.stream.received[self.num_seen :], len(self.worker.stream.received)
        for received in came:
            if received.kind == "reply":
                self.base, segment = (
                    received.header.result.version if received.header.weights.num_bytes else self.base,
                    None,
                )
                if received.header.weights.HasField("segment"):
                    segment = open_segment(received.header.weights.segment)
            start = received.offset
            if received.out_of_band:
                self.weights[start : start + received.out_of_band] = segment.payload[
                    start : start + received.out_of_band
                ]
            elif len(received.data):
                as_bytes(self.weights)[start : start + len(received.data)] = received.data
            self.num_left_out += received.left_out
        if segment is not None:
            self.worker.send(taken=pb.Taken())


async def trainers(server: Server, count: int, shares: bool) -> list[Trainer]:
    found = []
    for rank in range(count):
        worker = Worker(server, rank)
        await (worker.share() if shares else worker.join())
        found.append(Trainer(worker))
    await server.settle()
    return found


@pytest.mark.parametrize("shares", [False, True])
@served(layout=PARTS, max_staged=2, workers=2, mode="async")
async def test_a_worker_has_all_weights_though_only_what_has_changed_comes(server: Server, shares: bool) -> None:
    """Two workers in async, replies that are not asked for, and one that may have lost its weights."""
    chance = random.Random(0)
    both = await trainers(server, 2, shares)
    for _ in range(16):
        item, fate = chance.choice(both), chance.random()
        item.contribute(chance.randrange(2), has_base=fate > 0.2, wants_weights=fate < 0.8)
        await server.settle()
        item.take()
        if fate < 0.8:
            assert torch.equal(item.weights, server.engine.model.store.weights)
    assert sum(trainer.num_left_out for trainer in both) > 3 * BYTES
    server.check_no_memory_is_kept()


@served(layout=PARTS, max_staged=2, workers=2, mode="sync")
async def test_each_reply_of_a_round_has_the_part_that_it_was_of(server: Server) -> None:
    both = await trainers(server, 2, False)
    for part in (0, 1, 1, 0):
        before = [trainer.num_left_out for trainer in both]
        for item in both:
            item.contribute(part)
        await server.settle()
        for item, left_out in zip(both, before, strict=True):
            item.take()
            assert torch.equal(item.weights, server.engine.model.store.weights)
            assert BYTES - (2 << 20) < item.num_left_out - left_out <= BYTES
    assert both[0].worker.outcomes == ["START"] + ["APPLIED"] * 4


@served(layout=PARTS, max_staged=2, workers=1, mode="async")
async def test_who_does_not_say_that_it_has_them_is_sent_all_weights(server: Server) -> None:
    (item,) = await trainers(server, 1, False)
    item.contribute(0, has_base=False)
    await server.settle()
    item.take()
    assert item.num_left_out == 0


@served(layout=PARTS, max_staged=2, workers=1, mode="async")
async def test_zeros_that_came_already_are_refused(server: Server) -> None:
    (item,) = await trainers(server, 1, False)
    item.worker.announce(1)
    item.worker.stream.send(left_out_frame(0, BYTES), left_out_frame(BYTES - 4, 8))
    await server.settle()
    assert await item.worker.end() == "BAD_REQUEST"
    server.check_no_memory_is_kept()
