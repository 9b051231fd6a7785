"""The clock of a server process: monotonic seconds, and sleeping. A test's clock may jump."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NoReturn


class Clock:
    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def every(self, interval_s: float, work: Callable[[], object]) -> NoReturn:
        """Call `work` every `interval_s`, first after one interval. Its exceptions reach the awaiter."""
        while True:
            await self.sleep(interval_s)
            work()
