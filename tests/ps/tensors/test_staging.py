"""Bounded memory for uploads, lent in the order in which they are folded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.ps.tensors.staging import StagingPool


async def turn() -> None:
    """Let coroutines whose future was resolved run, and what they resolve in turn."""
    for _ in range(2):
        await asyncio.sleep(0)


def ask(pool: StagingPool, position: int | Callable[[], int]) -> asyncio.Future[Any]:
    return pool.request(position if callable(position) else lambda: position)


async def finished(awaitable: Awaitable[Any]) -> Any:
    """The result of something that must not have to wait."""
    task = asyncio.ensure_future(awaitable)
    await turn()
    assert task.done(), "it waits"
    return task.result()


async def test_a_position_that_is_too_high_waits_though_memory_is_free() -> None:
    """Or M stragglers-to-be fill the memory, and the one that is folded first finds none."""
    pool = StagingPool(2, 16)
    positions = {"late": 2}
    late = ask(pool, lambda: positions["late"])
    await turn()
    assert not late.done()
    assert pool.num_lent == 0
    early = await finished(pool.request(lambda: 0))
    positions["late"] = 1
    pool.look_again()
    await finished(late)
    pool.give_back(early)


async def test_the_lowest_position_is_served_first() -> None:
    pool = StagingPool(1, 16)
    first = await finished(pool.request(lambda: 0))
    order: list[str] = []
    tasks = []
    for name, position in (("c", 0), ("b", 0), ("a", 0)):
        task = ask(pool, position)
        task.add_done_callback(lambda _, name=name: order.append(name))
        tasks.append(task)
        await turn()
    pool.give_back(first)
    for task in tasks:
        pool.give_back(await finished(task))
    assert order == ["c", "b", "a"], "equal positions in the order in which they asked"


async def test_a_payload_that_is_not_the_pools_changes_nothing() -> None:
    """A worker's own segment passes through the same hands as the pool's payloads, and is never lent to others."""
    pool = StagingPool(1, 16)
    payload = await finished(pool.request(lambda: 0))
    foreign = torch.zeros(16, dtype=torch.uint8)
    assert pool.is_own(payload)
    assert not pool.is_own(foreign)
    waiting = ask(pool, 0)
    pool.give_back(foreign)
    pool.donate(foreign)
    pool.reclaim([foreign, foreign])
    await turn()
    assert not waiting.done()
    assert pool.num_lent == 1
    pool.give_back(payload)
    assert await finished(waiting) is payload


@given(limit=st.integers(1, 4), actions=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_the_bound_holds_whatever_happens(limit: int, actions: list[tuple[int, int]]) -> None:
    """Asks, cancels, returns, donations in any order: never more than the limit lent, none lent twice, none lost."""

    async def play() -> None:
        pool = StagingPool(limit, 8)
        asking: list[asyncio.Future[Any]] = []
        buffers: list[Any] = []
        donated: list[Any] = []
        created: set[int] = set()
        for kind, pick in actions:
            if kind == 0:
                asking.append(ask(pool, pick % (limit + 1)))
            elif kind == 1 and asking:
                pool.withdraw(asking.pop(pick % len(asking)))
            elif kind == 2 and buffers:
                pool.give_back(buffers.pop(pick % len(buffers)))
            elif kind == 3 and buffers and not donated:
                donated.append(buffers.pop(pick % len(buffers)))
                pool.donate(donated[-1])
            elif kind == 3 and donated:
                pool.reclaim([donated.pop()])
            if pick % 2:
                await turn()  # or several things happen at once
                for task in [task for task in asking if task.done()]:
                    asking.remove(task)
                    buffers.append(task.result())
        await turn()
        for task in [task for task in asking if task.done()]:
            asking.remove(task)
            buffers.append(task.result())
        created = {id(payload) for payload in buffers + donated}
        assert len(created) == len(buffers) + len(donated), "one payload in two hands"
        assert pool.num_lent == len(buffers) <= limit
        # Who still waits does so for a reason: all is lent, or its position is not served.
        for payload in buffers:
            pool.give_back(payload)
        await turn()
        for task in asking:
            pool.withdraw(task)
        assert pool.num_lent == 0

    asyncio.run(play())
