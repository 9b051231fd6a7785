"""Time as a server process has it: monotonic seconds, and waiting for them. A test's may jump."""

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
        """Do it again and again, first after `interval_s`; what it raises is the awaiter's."""
        while True:
            await self.sleep(interval_s)
            work()
