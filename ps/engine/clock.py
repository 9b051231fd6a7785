"""The time of a server process: its clock, which a test may replace by one that jumps, and tasks beside each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn


class Clock:
    now = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def every(self, interval_s: float, work: Callable[[], object]) -> NoReturn:
        """Call `work` every `interval_s`, first after one interval. Its exceptions reach the awaiter."""
        while True:
            await self.sleep(interval_s)
            work()


async def until_one_ends(*work: Coroutine[Any, Any, object]) -> None:
    """Run these beside each other until one ends, and cancel the others. Raises the error of one that has failed."""
    tasks = [asyncio.create_task(item) for item in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
