"""The server process: it listens, reports health, ticks and status, and writes the result files at the end."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import asdict

import torch

from ..common.config.schema import Config
from ..common.errors import EXIT_BUG, OutputError, ParamServerError, UnreachableError
from ..common.reporting.log import get_logger
from ..common.reporting.output import write_results
from ..common.tensors.optimizers import check_arguments
from .core.controls import keep_out
from .core.effects import RunEnded, RunStarted, StatusTaken
from .core.events import Stopped
from .engine.engine import Clock, Engine, until_one_ends
from .engine.modes import make_policy
from .engine.resuming import go_on
from .observe import reports
from .observe.sinks import make_bus
from .shards.attend import Attendance, BeginRun, End
from .shards.link import collect, write_tables
from .shards.server import shared_config
from .snapshots.available import Available
from .snapshots.common import choose_common
from .snapshots.snapshots import after_going_back
from .wire.security import check_security, security_text
from .wire.service import Listening, ParameterServerService

log = get_logger()

_TICK_S = 0.2


def check_before_start(config: Config) -> None:
    """Raise errors now that would otherwise end the run only after training."""
    check_arguments(config.optimizer.name, config.optimizer.arguments())
    check_security(config)


class Server:
    """One `ps-server` process. `start` binds. `serve` returns when the run is over or after a stop.

    With several shards this is the coordinator, and the run begins once all shards have registered.
    """

    def __init__(self, config: Config, before: Server | None = None, clock: Clock | None = None) -> None:
        """`before` is a server that went back; this one continues its run, even without a snapshot."""
        self._config, self._clock = config, clock or Clock()
        self.stop_requested = asyncio.Event()
        self.goes_back = False  # True: a new server in this process resumes from the newest common snapshot
        self._has_begun = False
        self._was_done = asyncio.Event()  # set if the run had all its steps already at the start
        self._bus = make_bus(config)
        self.engine: Engine = Engine(
            config, make_policy(config), name=secrets.token_hex(6), publish=self._bus.publish,
            is_observed=self._bus.takes, now=self._clock.now,
        )  # fmt: skip
        self._run, self._model, self._tensors = self.engine.run, self.engine.model, self.engine.tensors
        self._copies, self.engine.go_back = self.engine.copies, self._go_back
        self._evicted: tuple[int, ...] = ()
        if before is not None:
            run, self.engine.parent = before.engine.run, before.engine.parent
            self._run.name, self._run.incarnation = run.name, run.incarnation + 1
            self._run.roster.restore(run.roster.num_joins)
            self._evicted = tuple(sorted(run.roster.evicted))
        self._listening = Listening(config)
        self._attendance: Attendance | None = None
        if config.server.shards > 1:
            self._attendance = Attendance(self.engine, self._assemble, self._lost)
            self._copies.gather = lambda version, tensors: collect(self.engine, tensors, version=version)

    def after(self, config: Config) -> Server:
        """Return the server that replaces this one after it went back to a snapshot."""
        snapshots = self.engine.snapshots
        return Server(after_going_back(config, snapshots.num_written), before=self, clock=self._clock)

    @property
    def address(self) -> str:
        return self._listening.address

    async def start(self) -> None:
        """Resume from a snapshot, if there is one, and listen. Raises BindError if the address is not available."""
        config, engine = self._config, self.engine
        self._available = Available(config)
        if self._attendance is None:
            found = self._available.versions
            go_on(engine, self._available, self._available.newest())
        attend = self._attendance.attend if self._attendance else None
        service = ParameterServerService(engine, attend, self._listening.direct)
        self._listening.bind()
        if self._attendance is None:
            self._begin(found)
        self._bus.begin(engine)
        await self._listening.serve(service.handler())
        about: dict[str, object] = {"mode": self._run.mode, "run": self._run.name}
        about |= {"shards": config.server.shards} if self._attendance is not None else {}
        about |= {"direct_port": port} if (port := self._listening.direct.number) else {}
        about |= {name: steps for name in ("steps", "epochs") if (steps := getattr(config.run, name)) is not None}
        log.info("listening", address=self.address, security=security_text(config), **about)

    def _begin(self, found: tuple[int, ...]) -> None:
        """Begin the run, whose state is complete now. All shards have snapshots of the versions `found`."""
        config, engine, run, model = self._config, self.engine, self._run, self._model
        self._restored()
        keep_out(run, self._evicted)
        engine.tell(RunStarted(
            run.name, run.incarnation, run.mode, run.policy.version, dict(run.policy.committed),
            config.run.workers, run.policy.staleness_bound, source=model.source or None,
            skipped=tuple(engine.skipped_snapshots), options=run.policy.options.model_dump(mode="json"),
            common=asdict(run.policy.common), found=found,
        ))  # fmt: skip
        self._has_begun = True
        if run.has_weights and run.was_over_before:
            self._was_done.set()
            weights, fix = f"{model.source}/weights.safetensors", "or use another --checkpoint-dir for a new run"
            if not run.rhythm.is_local:
                weights, fix = model.source, "for the server above"
            fix = f"raise --steps or --epochs to continue, {fix}"
            log.info("already_done", steps=run.policy.min_steps_done, weights=weights, fix=fix)

    def _restored(self) -> None:
        """Called before the run begins, after it was restored from a snapshot."""

    # ---- several shards ---------------------------------------------------------------------

    def _assemble(self) -> None:
        """Begin the run once all shards are here, or continue from a common snapshot."""
        assert self._attendance is not None
        try:
            by_shard = {shard: line.register.snapshots for shard, line in self._attendance.lines.items()}
            by_shard[0] = self._available.entries
            common = set.intersection(*({entry.name.version for entry in entries} for entries in by_shard.values()))
            name = choose_common(by_shard) if self._config.checkpoint.resume != "never" else None
            go_on(self.engine, self._available, name)
        except ParamServerError as error:
            self.engine.end_with(error)
            return
        self._begin(tuple(sorted(common, reverse=True)))
        run = self._run
        num_joins = {} if name is not None else dict(run.roster.num_joins)
        shared = shared_config(self._config)
        self._attendance.begin_run(BeginRun(run.name, run.incarnation, name, shared, num_joins, self._evicted))

    def _lost(self, shard: int) -> None:
        """Handle a lost shard: all go back to the newest common snapshot; without snapshots the run ends."""
        if self._config.checkpoint.dir is None:
            message = f"shard {shard} was lost at version {self._run.policy.version}, and no snapshots are kept"
            fix = "start everything again, with --checkpoint-dir to keep snapshots"
            self.engine.end_with(UnreachableError(message, fix=fix))
            return
        log.error("shard_lost", shard=shard, meaning="all go back to the newest snapshot that every shard has")
        self._go_back()

    def _go_back(self) -> None:
        """End the run here. A new server in this process goes on with it."""
        self.goes_back = True
        self.stop_requested.set()
        self.engine.notify()

    async def _end_shards(self) -> None:
        """End the other shards as this one ends."""
        if self._attendance is None:
            return
        if self.goes_back:
            self._attendance.dismiss()
            return
        error = self.engine.error
        code = error.exit_code if isinstance(error, ParamServerError) else EXIT_BUG
        await self._attendance.stop(End(str(error), code) if error is not None else End())

    # ---- from beginning to end ----------------------------------------------------------------

    async def serve(self) -> None:
        """Serve until every worker has finished, the run has failed, or a stop was requested."""
        engine = self.engine
        try:
            await until_one_ends(
                asyncio.wait([self.engine.finished]),
                self.stop_requested.wait(),
                self._nobody_comes(),
                self._clock.every(_TICK_S, self._tick),
                self._clock.every(self._config.server.status_interval_s, self._report),
            )
        except Exception as error:  # a dead helper would leave time-outs and leases unchecked
            log.error("helper_failed", error=f"{type(error).__name__}: {error}")
            engine.end_with(ParamServerError(f"the server failed: {type(error).__name__}: {error}"))
        await self._wind_down()
        tensors = await self._final_tensors()
        lost = await self._write_tables() if tensors else None
        await self._copies.best_written(is_cut_short=self.goes_back)
        await self._end_shards()
        await self._listening.stop()
        engine.close()
        policy, stop_when = self._run.policy, self._run.options.stop_when
        if stop_when and not self._run.curve.points:
            log.warning("never_evaluated", reason=f"run.stop_when is '{stop_when}'")
        is_over = self._run.is_done and not self._run.roster.workers
        engine.tell(RunEnded(policy.version, dict(policy.committed), self._has_begun, is_over))
        self._bus.close()
        if self.goes_back:
            return
        if self._model.has_weights:  # also of an incomplete run
            summary = reports.summary(self.engine)
            metadata = {"mode": summary.mode, "version": str(self._model.store.version), "run": self._run.name}
            write_results(self._config, summary, tensors, metadata)
        if engine.error is not None:
            raise engine.error
        if lost is not None:
            raise lost

    async def _nobody_comes(self) -> None:
        """Wait for a while if the run was already done, to notify workers that are started with it."""
        await self._was_done.wait()
        await self._clock.sleep(self._config.server.absent_s)
        await self.engine.until(lambda: not self._run.roster.workers)

    async def _wind_down(self) -> None:
        """Take a last snapshot, and give the workers a moment to leave."""
        engine = self.engine
        await self._listening.say_healthy(False)
        if self.goes_back or not self._has_begun:
            engine.let_go()
        else:
            engine.offer(Stopped())
            await engine.until(lambda: self.goes_back or not engine.is_writing)
        # Notified workers end their streams themselves. The time limit is for the others.
        try:
            await engine.until(lambda: not engine.peers, self._config.server.drain_s)
        except TimeoutError:
            log.info("streams_left", count=len(engine.peers))

    def _tick(self) -> None:
        if self._has_begun:
            self.engine.tick()

    def _report(self) -> None:
        self._bus.publish(self.engine.now(), StatusTaken(reports.status(self.engine)))

    async def _final_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the weights of all shards to be saved, by name."""
        output, model, tensors = self._config.output, self._model, self._tensors
        if output.save is None or self.goes_back or not model.has_weights:
            return {}
        if tensors.is_broken:
            log.error("not_saved", reason="earlier work on the weights failed, so they are not a valid version")
            return {}
        if self._attendance is None:
            return model.store.tensors(output.save_averaged)
        with contextlib.suppress(TimeoutError):
            await self.engine.until(lambda: not tensors.is_paused, self._config.server.drain_s)
        if tensors.is_paused:
            log.error("not_saved", reason="a lost shard has not reported the norm of its part of the last mean")
            return {}
        local_tensors = await tensors.run(lambda: model.store.tensors(output.save_averaged))
        try:
            return await collect(self.engine, local_tensors, averaged=output.save_averaged)
        except OutputError as error:
            if self.engine.error is None:
                raise
            log.error("not_saved", reason=error.message)  # the run ends with its own error instead
            return {}

    async def _write_tables(self) -> ParamServerError | None:
        """Write the tables beside the weights; returns the error of a failure."""
        if self._model.store.tables is not None and not self._tensors.is_broken:
            try:
                await write_tables(self.engine)
            except ParamServerError as error:
                log.error("not_saved", reason=error.message)
                return error
        return None
