"""The same thing done with all shards at once: with the first on the calling thread, with each other on its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from ...common.errors import ParamServerError
from .client import Lost
from .helper import Helper, wait_for
from .shard import Shard

Result = TypeVar("Result")

_END_S = 2.0


class Crew:
    """Threads for the shards beyond the first."""

    def __init__(self) -> None:
        self._helpers: list[Helper] = []

    def all(self, shards: Sequence[Shard], work: Callable[[Shard], Result]) -> list[Result]:
        """`work` for each shard; their results in order. When one fails, the others' streams are closed, since nothing
        can come of them any more; a refusal is raised rather than the losses that follow from it."""
        if len(shards) == 1:
            return [work(shards[0])]

        def guarded(shard: Shard) -> Result:
            try:
                return work(shard)
            except Exception as error:
                _hang_up(shards)
                if isinstance(error, Lost):
                    raise Lost(f"shard {shard.number} at {shard.client.address}: {error}") from None
                raise

        while len(self._helpers) < len(shards) - 1:
            self._helpers.append(Helper(f"shard {len(self._helpers) + 1}"))
        first: Future[Result] = Future()
        others = [
            helper.submit(partial(guarded, shard)) for helper, shard in zip(self._helpers, shards[1:], strict=False)
        ]
        try:
            try:
                first.set_result(guarded(shards[0]))
            except (Lost, ParamServerError) as error:
                first.set_exception(error)
            for future in others:
                wait_for(future)
        except BaseException:  # interrupted, and about to say goodbye to the first shard
            _hang_up(shards[1:])
            wait(others, _END_S)
            raise
        futures = [first, *others]
        failures = [failure for future in futures if (failure := future.exception()) is not None]
        if failures:
            raise next((error for error in failures if not isinstance(error, Lost)), failures[0])
        return [future.result() for future in futures]

    def dismiss(self) -> None:
        """No more work; waits for the threads to end. Their connections must be closed."""
        for helper in self._helpers:
            helper.end()


def _hang_up(shards: Sequence[Shard]) -> None:
    for shard in shards:
        shard.client.hang_up()
