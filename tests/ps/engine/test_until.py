"""Waiting for something to be so: nobody is woken in vain, since this is looked at with every contribution."""

from __future__ import annotations

import asyncio

import pytest

from paramserver.common.config.sources import load_config
from paramserver.common.errors import ParamServerError
from paramserver.ps.engine.engine import Engine
from paramserver.ps.engine.modes import make_policy


async def test_who_waits_for_the_end_goes_on_when_it_ends() -> None:
    config = load_config(None, {}, [], {}).config
    engine = Engine(config, make_policy(config), name="r")
    waiting = asyncio.create_task(engine.until(engine.finished.done))
    await asyncio.sleep(0)
    engine.end_with(ParamServerError("over"))
    await asyncio.wait_for(waiting, 1)  # there are no ticks before a server has begun: nothing else would wake it
    assert isinstance(engine.finished.exception(), ParamServerError)
    engine.close()


async def test_who_waits_goes_on_when_it_is_so_and_not_before() -> None:
    config = load_config(None, {}, [], {}).config
    engine = Engine(config, make_policy(config), name="r")
    so, asked, over = False, 0, []

    def condition() -> bool:
        nonlocal asked
        asked += 1
        return so

    async def wait() -> None:
        await engine.until(condition)
        over.append(True)

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    for _ in range(5):
        engine.notify()
    await asyncio.sleep(0)
    assert (asked, over) == (6, [])
    so = True
    engine.notify()
    await waiting
    assert over == [True]
    so = False
    with pytest.raises(TimeoutError):
        await engine.until(condition, 0.01)
    engine.notify()  # nobody waits any more
    engine.close()
