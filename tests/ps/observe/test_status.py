"""Where a run with very many workers stands, in a status of bounded size."""

from __future__ import annotations

import asyncio

from paramserver.common.config.schema import Config
from paramserver.common.reporting.report import TerminalConsole, status_panel
from paramserver.common.reporting.summary import Status
from paramserver.ps.core import events
from paramserver.ps.engine.engine import Engine
from paramserver.ps.engine.modes import make_policy
from paramserver.ps.observe.reports import status

from ...records import contributed

NUM_WORKERS = 200


def status_of_many() -> Status:
    """Of a run in which everybody but rank 150 has contributed; nothing is carried out."""

    async def main() -> Status:
        config = Config(run={"mode": "sync", "steps": 10}, limits={"workers": NUM_WORKERS})
        engine = Engine(config, make_policy(config), name="run")
        engine._carry_out = {}
        for rank in range(NUM_WORKERS):
            engine.offer(events.Joined(rank + 1, rank, process=f"{rank}"))
            engine.offer(events.Offered(rank, 1, "model", "sgd"))
            if rank == 0:
                engine.offer(events.Brought(0, 1))
        for rank in range(NUM_WORKERS):
            if rank != 150:
                engine.run.apply(contributed(rank, 1, 1, 0, loss=rank))
        found = status(engine)
        engine.close()
        return found

    return asyncio.run(main())


def test_of_very_many_those_are_shown_that_others_wait_for() -> None:
    found = status_of_many()
    assert (len(found.workers), found.left_out) == (64, NUM_WORKERS - 64)
    assert 150 in [worker.rank for worker in found.workers]
    assert found.loss == sum(rank for rank in range(NUM_WORKERS) if rank != 150) / (NUM_WORKERS - 1)
    assert Status.parse(found.fields()) == found
    console = TerminalConsole()
    with console.capture() as shown:
        console.print(status_panel(found))
    assert "and 136 more workers" in shown.get()
