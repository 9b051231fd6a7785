"""Asyncio tasks beside each other."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


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
