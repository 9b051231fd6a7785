"""DC-ASGD against its formula: a late gradient is moved from the weights that its worker really has to those of now."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from paramserver.common.config.schema import Config
from paramserver.common.errors import UsageError
from paramserver.common.tensors.layout import Layout
from paramserver.ps.engine.modes import make_policy, policy_of

from ..streams import LARGE, SMALL, Server, Worker, served, weight_of

LR = 0.5
# (rank, gradient), those of a round all on their way before any gets its reply.
ROUNDS = [[(0, 1.0), (1, -2.0), (2, 0.5)], [(2, 3.0), (0, -1.0)], [(1, 2.0), (0, 1.5), (2, -2.5)], [(1, 1.0)]]


def by_formula(
    weight: float, was: float, gradient: float, kind: str, strength: float, ms: float
) -> tuple[float, float]:
    """Zheng et al. 2017: weight and mean square after a gradient of weight `was`."""
    w, then, g = np.float32(weight), np.float32(was), np.float32(gradient)
    ms = 0.95 * ms + 0.05 * g * g
    rate = strength / np.sqrt(ms + 1e-7) if kind == "adaptive" else strength
    return float(w - LR * (g + rate * g * g * (w - then))), ms


def version_and_weight(worker: Worker) -> tuple[int, float]:
    """Version and weight that it has got."""
    reply = next(message.header for message in reversed(worker.stream.received) if message.kind == "reply")
    return reply.result.version, worker.weights()[0].item()


@pytest.mark.parametrize("layout", [SMALL, LARGE])
@pytest.mark.parametrize(("kind", "given", "strength"), [("adaptive", None, 2.0), ("constant", 0.3, 0.3)])
@pytest.mark.parametrize("delayed_update", [False, True])
def test_a_late_gradient_is_moved_to_the_weights_of_now(
    layout: Layout, kind: str, given: float | None, strength: float, delayed_update: bool
) -> None:
    options: dict[str, Any] = {"late_compensation": kind, "late_lambda": given, "delayed_update": delayed_update}

    @served(layout=layout, max_staged=3, policy=options, mode="async", workers=3)
    async def play(server: Server) -> None:
        workers = await server.workers(3)
        has = [[version_and_weight(worker)] for worker in workers]  # of each, what it has been given
        weight = ms = 0.0
        for turn in ROUNDS:
            of = {}
            for rank, gradient in turn:
                of[rank] = base = has[rank][-2:][0] if delayed_update else has[rank][-1]
                workers[rank].contribute(server.engine.run.policy.num_counted[rank] + 1, gradient, version=base[0])
            await server.settle()
            for rank, _ in turn:
                has[rank].append(version_and_weight(workers[rank]))
            for rank, gradient in sorted(turn, key=lambda item: has[item[0]][-1][0]):  # as they were taken
                weight, ms = by_formula(weight, of[rank][1], gradient, kind, strength, ms)
                assert has[rank][-1][1] == pytest.approx(weight, rel=1e-5)
        assert weight_of(server) == pytest.approx(weight, rel=1e-5)
        num_copies = (2 if delayed_update else 1) * 3 + (kind == "adaptive")
        assert server.engine.state.bytes["delivered"] == num_copies * layout.exchange_bytes
        server.check_no_memory_is_kept()
        server.check_nobody_reads()

    play()


@served(layout=LARGE, max_staged=2, policy={"late_compensation": "constant"}, mode="async", workers=2)
async def test_weights_that_others_move_before_they_are_sent_are_those_that_are_kept(server: Server) -> None:
    slow, other = await server.workers(2)
    may_write, write = asyncio.Event(), slow.stream.write

    async def write_later(raw: bytes) -> None:
        await may_write.wait()
        await write(raw)

    slow.stream.write = write_later  # type: ignore[method-assign]
    for _ in range(2):  # one is written while the next is made
        server.engine.peers[0, 1].say("a word before the reply")
    slow.contribute(1, 1.0)
    await server.settle()
    other.contribute(1, 1.0)
    await server.settle()
    now = server.engine.model.store.weights.view(torch.float32)[0].item()
    may_write.set()
    await server.settle()
    version, then = version_and_weight(slow)
    slow.contribute(2, 1.0, version=version)
    await server.settle()
    expected, _ = by_formula(now, then, 1.0, "constant", 0.04, 0.0)
    assert then > now
    assert weight_of(server) == pytest.approx(expected, rel=1e-5)
    server.check_nobody_reads()


@served(policy={"late_compensation": "constant"}, mode="async", workers=1)
async def test_of_weights_that_are_gone_it_is_taken_as_it_came(server: Server) -> None:
    (worker,) = await server.workers(1)
    for number in (1, 2):
        worker.contribute(number, 1.0, version=0)
        await server.settle()
    assert weight_of(server) == -2 * LR


@served(policy={"late_compensation": "constant"}, mode="async", workers=1)
async def test_weights_that_are_encoded_are_refused_with_it(server: Server) -> None:
    worker = Worker(server, 0)
    await worker.join(reply_codec="q4")
    assert await worker.end() == "BAD_REQUEST"


def test_they_are_refused_before_anybody_comes() -> None:
    settings = {"run": {"mode": "async"}, "policy": {"late_compensation": "constant"}, "worker": {"reply_codec": "q4"}}
    with pytest.raises(UsageError, match=r"worker.reply_codec is q4"):
        make_policy(Config.model_validate(settings))


def test_a_strength_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"policy.late_compensation none"):
        policy_of("async", {"late_lambda": 0.1})
