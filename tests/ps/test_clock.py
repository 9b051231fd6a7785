"""A server's ticks follow its clock, which a test can make jump: a lease passes in no time."""

from __future__ import annotations

import asyncio

from paramserver.common.config.schema import Config
from paramserver.ps.core import events
from paramserver.ps.engine.engine import Clock
from paramserver.ps.server import Server


class JumpingClock(Clock):
    """Stands still unless it is made to jump; whoever sleeps wakes when its time has come."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        end = self.time + seconds
        while self.time < end:
            await asyncio.sleep(0)

    async def jump(self, seconds: float) -> None:
        """In steps shorter than a tick: a server that was not woken for one takes it for time in which it stood."""
        end = self.time + seconds
        while self.time < end:
            self.time = min(end, self.time + 0.1)
            for _ in range(10):
                await asyncio.sleep(0)


def test_a_silent_worker_is_let_go_when_the_clock_says_so() -> None:
    async def main() -> None:
        clock = JumpingClock()
        server = Server(Config(run={"mode": "async"}, server={"listen": "127.0.0.1:0", "lease_s": 100}), clock=clock)
        await server.start()
        serving = asyncio.create_task(server.serve())
        engine = server.engine
        engine.offer(events.Joined(0, 0, process="p"))
        engine.offer(events.HeartbeatBegan("p"))
        engine.offer(events.Heartbeat(0, "p"))
        await clock.jump(99)
        assert list(engine.run.roster.workers) == [0]
        await clock.jump(2)
        assert not engine.run.roster.workers, "no tick came, or its time was not the clock's"
        server.stop_requested.set()
        await serving

    asyncio.run(asyncio.wait_for(main(), 20))
