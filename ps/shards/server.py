"""A shard other than the coordinator, as a process: registers, serves workers, does what it is told."""

from __future__ import annotations

import asyncio
import json

from ...common.config.schema import Config, own_modes
from ...common.errors import ParamServerError
from ...common.reporting.log import get_logger
from ...common.version import PROGRAM_VERSION
from ..core.modes import make_policy
from ..core.run import Run
from ..observe.sinks import make_bus
from ..snapshots.available import Available
from ..snapshots.resume import after_going_back
from ..snapshots.run_adapter import RunSnapshots, resume_at
from ..wire.listening import Listening
from ..wire.service import ParameterServerService
from . import orders
from .follower import FollowerRun
from .link import Link, LinkLost

log = get_logger()

_TICK_S = 0.2
_STATE_S = 1.0
_POLL_S = 0.02
# Sections of the coordinator's configuration that hold for all shards.
_SHARED = ("run", "policy", "store", "optimizer", "task")


def shared_config(config: Config) -> str:
    """What the coordinator tells the others of its configuration."""
    return json.dumps({name: getattr(config, name).model_dump(mode="json") for name in _SHARED})


def with_shared(config: Config, text: str) -> Config:
    """This shard's configuration with the coordinator's shared sections."""
    told = json.loads(text)
    return Config.model_validate({**config.model_dump(), **told, "run": own_modes(config, told["run"])})


class ShardServer:
    """One process. `start` binds, `serve` returns when the run is over, a stop was requested, or it goes back."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.stop_requested = asyncio.Event()
        self.goes_back = False  # to the newest common snapshot, with a new server in this process
        self._listening = Listening(config)
        self._link = Link(config)
        self._run: FollowerRun | None = None
        self._snapshots: RunSnapshots | None = None

    def after(self, config: Config) -> ShardServer:
        """The server that goes on where this one went back."""
        return ShardServer(after_going_back(config, self._snapshots is not None and self._snapshots.has_written))

    @property
    def address(self) -> str:
        return self._listening.address

    async def start(self) -> None:
        """BindError when the address cannot be had."""
        self._listening.bind()

    async def serve(self) -> None:
        living = asyncio.create_task(self._live())
        stop = asyncio.create_task(self.stop_requested.wait())
        try:
            await asyncio.wait([living, stop], return_when=asyncio.FIRST_COMPLETED)
            if not living.done() and self._run is not None:
                # Whoever stops everything stops the coordinator too, which takes a last snapshot of all shards.
                await asyncio.wait([living], timeout=self._config.server.drain_s)
        finally:
            stop.cancel()
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)
            await self._close()
        if not living.cancelled():
            living.result()
        if self._run is not None and self._run.finished.done():
            self._run.finished.result()

    async def _live(self) -> None:
        server = self._config.server
        available = Available(self._config)
        register = orders.Register(
            server.shard,
            server.shards,
            server.advertise or self.address,
            available.entries,
            self._config.checkpoint.dir is not None,
            PROGRAM_VERSION,
        )
        begin = await self._link.register(register)
        run = self._run = self._begin(begin, available)
        run.bus.begin(run)
        service = ParameterServerService(run, run.config)
        await self._listening.serve(service.handler())
        log.info(
            "listening", address=self.address, shard=server.shard, shards=server.shards, coordinator=server.coordinator
        )
        self._link.report(orders.Ready())
        helpers = [asyncio.create_task(self._tick(run)), asyncio.create_task(self._report_state(run))]
        try:
            async for event, now in self._link.events():
                run.happened(event, now)
                if isinstance(event, orders.End):
                    self._link.report(state_of(run))
                    await self._link.finish()
                    return
        except LinkLost as lost:
            self.goes_back = not self.stop_requested.is_set()
            log.warning("coordinator_lost", address=server.coordinator, reason=str(lost))
        except ParamServerError as error:
            self._link.report(orders.ShardFailed(error.message))
            raise
        finally:
            for helper in helpers:
                helper.cancel()

    def _begin(self, begin: orders.BeginRun, available: Available) -> FollowerRun:
        """The run that the coordinator says this is, where it says that it stands."""
        config = with_shared(self._config, begin.config)
        policy = make_policy(config)
        bus = make_bus(self._config)
        run = FollowerRun(config, policy, begin.run, begin.server_incarnation, self._link.report, bus)
        resume_at(run, config, available, begin.snapshot)
        run.name, run.incarnation = begin.run, begin.server_incarnation
        if config.checkpoint.dir is not None:
            self._snapshots = snapshots = RunSnapshots(run, config)
            run.take_snapshot = snapshots.take
            snapshots.on_attempt = lambda: self._link.report(orders.Durable(run.saved_version))
            self._link.report(orders.Durable(run.saved_version))
        return run

    async def _tick(self, run: FollowerRun) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            run.tick()

    async def _report_state(self, run: FollowerRun) -> None:
        while True:
            if run.model.has_weights:
                self._link.report(state_of(run))
            await asyncio.sleep(_STATE_S)

    async def _close(self) -> None:
        await self._listening.no_longer_healthy()
        if self._run is not None:
            self._run.drain()
        await self._link.close()
        await self._listening.stop(_POLL_S)
        if self._run is not None:
            self._run.tensors.close()
        if self._snapshots is not None:
            self._snapshots.close()
        if self._run is not None:
            self._run.bus.close()


def state_of(run: Run) -> orders.ShardState:
    """What a shard holds of the model, and what has passed through it."""
    held = dict(run.model.store.num_bytes) if run.model.has_weights else {}
    traffic = {rank: (stats.bytes_sent, stats.bytes_received) for rank, stats in run.roster.stats.items()}
    return orders.ShardState(run.policy.version, held, traffic)
