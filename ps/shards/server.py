"""The process of a shard other than the coordinator: it registers, serves workers, and carries out orders."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import asdict

from pydantic import TypeAdapter

from ...common.config.schema import Config, own_modes
from ...common.errors import DivergedError, ParamServerError, UsageError, shown
from ...common.reporting.log import get_logger
from ...common.version import PROGRAM_VERSION
from ...common.wire.json_text import read_json
from ..core.controls import keep_out
from ..core.run import Follower
from ..core.state import Options
from ..engine.engine import Clock, Engine, until_one_ends
from ..engine.modes import make_policy, options_of
from ..engine.resuming import go_on
from ..observe.sinks import make_bus
from ..snapshots.available import Available
from ..snapshots.snapshots import after_going_back
from ..wire.service import Listening, ParameterServerService
from .attend import BeginRun, End, Ready, Register, ShardFailed
from .link import Link, LinkLost

log = get_logger()

_TICK_S = 0.2
_STATE_S = 1.0
_GOODBYE_S = 1.0
_MOST_SHOWN = 500  # characters of an error
_FAILED_S = 10.0  # time for the coordinator to end a run that failed on this shard

_OPTIONS = TypeAdapter(Options)
# Sections of the coordinator's configuration that hold for all shards.
_SHARED = ("run", "policy", "store", "optimizer", "task")


class EndedError(ParamServerError):
    """The coordinator has ended the run with an error; this shard ends with the same exit code."""

    def __init__(self, end: End) -> None:
        super().__init__(f"the coordinator ended the run: {end.error}")
        self.exit_code = end.exit_code


def shared_config(config: Config) -> str:
    """Return the part of the coordinator's configuration that must be the same on all shards, as JSON."""
    sections = {name: getattr(config, name).model_dump(mode="json") for name in _SHARED}
    return json.dumps({**sections, "options": asdict(options_of(config))})


def with_shared(config: Config, text: str) -> tuple[Config, Options]:
    """Return this shard's configuration with the coordinator's shared sections, and the options of the run.

    Raises UsageError for any other section, because only this shard decides which files it reads and writes.
    """
    try:
        sections = read_json(text, nan=True)
        if sections.keys() != {*_SHARED, "options"}:
            raise ValueError(f"it has {shown(', '.join(sections))}, and {', '.join(_SHARED)} and options are shared")
        options = sections.pop("options")
        sections["run"] = own_modes(config.run.modes, sections["run"])
        shared = Config.model_validate(config.model_dump() | sections)
        return shared, _OPTIONS.validate_python(options)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        problem = f"shard {config.server.shard} does not understand the coordinator's configuration"
        text = shown(str(error).replace("\n", " "), _MOST_SHOWN)
        raise UsageError(f"{problem}: {text}", fix="install the same version of paramserver everywhere") from None


class ShardServer:
    """One shard process. `start` binds. `serve` returns when the run is over, after a stop, or when it goes back."""

    def __init__(self, config: Config, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or Clock()
        self.stop_requested = asyncio.Event()
        self.goes_back = False  # True: a new server in this process resumes from the newest common snapshot
        self._listening = Listening(config)
        self._link = Link(config, self._clock)
        self._bus = make_bus(config)
        self._engine: Engine | None = None

    def after(self, config: Config) -> ShardServer:
        """Return the server that replaces this one after it went back to a snapshot."""
        assert self._engine is not None  # it goes back from a run that it was in
        return ShardServer(after_going_back(config, self._engine.snapshots.num_written), self._clock)

    @property
    def address(self) -> str:
        return self._listening.address

    async def start(self) -> None:
        """Bind the address. Raises BindError."""
        self._listening.bind()

    async def serve(self) -> None:
        try:
            await until_one_ends(self._live(), self._stopped())
        finally:
            await self._close()

    async def _stopped(self) -> None:
        """Wait for a request to stop. A run that has begun gets time to end by itself."""
        await self.stop_requested.wait()
        if self._engine is not None:
            # The coordinator is usually stopped too, and takes a last snapshot of all shards.
            await asyncio.sleep(self._config.server.drain_s)

    async def _live(self) -> None:
        server, listening = self._config.server, self._listening
        available = Available(self._config)
        address, keeps = server.advertise or self.address, self._config.checkpoint.dir is not None
        begin = await self._link.register(
            Register(server.shard, server.shards, address, available.entries, keeps, PROGRAM_VERSION)
        )
        if isinstance(begin, End):
            if begin.error:
                raise EndedError(begin)
            return
        engine, follower = self._begin(begin, available)
        self._bus.begin(engine)
        await listening.serve(ParameterServerService(engine, direct=listening.direct).handler())
        log.info(
            "listening", address=self.address, shard=server.shard, shards=server.shards,
            coordinator=server.coordinator, direct_port=listening.direct.number,
        )  # fmt: skip
        follower.outbox.put(Ready())
        try:
            await self._follow(engine, follower)
        except LinkLost as lost:
            self.goes_back = not self.stop_requested.is_set()
            log.warning("coordinator_lost", address=server.coordinator, reason=str(lost))
        except ParamServerError as error:
            if not isinstance(error, DivergedError):
                follower.outbox.put(ShardFailed(error.message))
            await self._link.finish()
            raise

    def _begin(self, begin: BeginRun, available: Available) -> tuple[Engine, Follower]:
        """Begin the run that the coordinator names, from the snapshot that it names."""
        config, options = with_shared(self._config, begin.config)
        engine = self._engine = Engine(
            config,
            make_policy(config),
            name=begin.run,
            publish=self._bus.publish,
            is_observed=self._bus.takes,
            options=options,
            now=self._clock.now,
        )
        run = engine.run
        follower = Follower(happens=engine.happens, digest=run.digest)
        engine.sequencer = follower
        go_on(engine, available, begin.snapshot)
        run.name, run.incarnation = begin.run, begin.server_incarnation
        if begin.num_joins:
            run.roster.restore(begin.num_joins)
        keep_out(run, begin.evicted)
        self._link.carry(follower)
        return engine, follower

    async def _follow(self, engine: Engine, follower: Follower) -> None:
        """Carry out orders until the run is over or this shard fails."""

        def report_state() -> None:
            if engine.model.has_weights:
                follower.outbox.put(engine.state)

        await until_one_ends(
            self._obey(engine, follower),
            self._fail(engine, follower),
            self._clock.every(_TICK_S, engine.tick),
            self._clock.every(_STATE_S, report_state),
        )

    async def _fail(self, engine: Engine, follower: Follower) -> None:
        """Raise the error that ends the run on this shard.

        If the weights are not finite, this first reports it to the coordinator, which ends the run on all shards. If
        the coordinator only lost this shard, it would go back to a snapshot, and the run would diverge again.
        """
        try:
            finished = engine.finished
            await engine.until(lambda: engine.is_broken)
            finished.result()
        except DivergedError as error:
            follower.outbox.put(ShardFailed(error.message, error.exit_code, error.fix))
            await self._clock.sleep(_FAILED_S)  # the coordinator's End arrives in this time
            raise

    async def _obey(self, engine: Engine, follower: Follower) -> None:
        async for number, order in self._link.orders():
            if not isinstance(order, End):
                follower.hear(number, order)
                continue
            follower.outbox.put(engine.state)
            await self._link.finish()
            if order.error:
                raise EndedError(order)
            with contextlib.suppress(TimeoutError):  # workers say goodbye here too
                await engine.until(lambda: not engine.peers, _GOODBYE_S)
            return

    async def _close(self) -> None:
        await self._listening.say_healthy(False)
        if (engine := self._engine) is not None:
            engine.let_go()
        await self._link.close()
        await self._listening.stop()
        if engine is not None:
            engine.close()
            _ = engine.error  # already reported; reading it avoids asyncio's warning
        self._bus.close()
