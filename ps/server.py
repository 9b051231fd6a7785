"""The process around the service: address, health, ticks, status, and what is written at the end."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import torch

from ..common.config.schema import Config
from ..common.errors import EXIT_BUG, OutputError, ParamServerError, UnreachableError
from ..common.reporting.log import get_logger
from ..common.reporting.output import check_writable, write_results
from ..common.reporting.report import status_line
from ..common.tensors.optimizers import check_arguments
from ..common.tensors.sharding import divide
from .core.facts import RunEnded, RunStarted
from .core.modes import make_policy
from .core.run import Run
from .observe import reports
from .observe.sinks import make_bus
from .shards.collect import collect
from .shards.coordinator import Coordinator
from .shards.orders import BeginRun, End
from .shards.server import shared_config
from .snapshots.available import Available
from .snapshots.common import choose_common
from .snapshots.resume import after_going_back
from .snapshots.run_adapter import RunSnapshots, resume_at
from .wire.listening import Listening
from .wire.security import check_security, security_text
from .wire.service import ParameterServerService

log = get_logger()

_TICK_S = 0.2
_POLL_S = 0.02
# With text logs, a status line every few seconds is enough for a person.
_TEXT_STATUS_S = 5.0


def check_before_start(config: Config) -> None:
    """Find what would fail at the end of training before it begins."""
    check_arguments(config.optimizer.name, config.optimizer.arguments())
    for path in (config.output.save, config.output.summary):
        if path is not None:
            check_writable(path)
    check_security(config)


class Server:
    """One `ps-server` process. `start` binds, `serve` returns when the run is over or a stop was requested.

    Of several shards this is the coordinator: the run begins when all have registered.
    """

    def __init__(self, config: Config, before: Server | None = None) -> None:
        """`before` went back: this one goes on with its run, also where that had no snapshot yet."""
        self._config = config
        self.stop_requested = asyncio.Event()
        self.goes_back = False  # to the newest common snapshot, with a new server in this process
        self._bus = make_bus(config)
        self.run = Run(config, make_policy(config), bus=self._bus)
        if before is not None:
            self.run.name, self.run.incarnation = before.run.name, before.run.incarnation + 1
            self.run.roster.membership.restore(before.run.roster.membership.num_joins)
        self._go_back = asyncio.Event()
        self._snapshots: RunSnapshots | None = None
        self._listening = Listening(config)
        self._coordinator: Coordinator | None = None
        if config.server.shards > 1:
            keeps = config.checkpoint.dir is not None
            self.run.shards = self._coordinator = Coordinator(self.run, config.server.shards, keeps)
            self._coordinator.on_complete = self._assemble
            self._coordinator.on_lost = self._lost

    def after(self, config: Config) -> Server:
        """The server that goes on where this one went back."""
        return Server(
            after_going_back(config, self._snapshots is not None and self._snapshots.has_written), before=self
        )

    @property
    def address(self) -> str:
        return self._listening.address

    async def start(self) -> None:
        """Go on from a snapshot, if there is one, and listen; BindError when the address cannot be had."""
        if self._coordinator is None:
            available = Available(self._config)
            resume_at(self.run, self._config, available, available.newest())
            self._keep_snapshots()
        else:
            self._available = Available(self._config)
        service = ParameterServerService(self.run, self._config)
        self._listening.bind()
        if self._coordinator is None:
            self._note_start()
        self._bus.begin(self.run)
        await self._listening.serve(service.handler())
        config = self._config
        of = {"shards": config.server.shards} if self._coordinator is not None else {}
        log.info(
            "listening",
            address=self.address,
            security=security_text(config),
            mode=config.run.mode,
            steps=config.run.steps,
            run=self.run.name,
            **of,
        )

    def _keep_snapshots(self) -> None:
        if self._config.checkpoint.dir is not None:
            self._snapshots = RunSnapshots(self.run, self._config)

    # ---- several shards ---------------------------------------------------------------------

    def _assemble(self) -> None:
        """All shards are here: begin, or go on from what all of them have."""
        assert self._coordinator is not None
        try:
            held = {0: self._available.entries, **self._coordinator.snapshots}
            name = choose_common(held) if self._config.checkpoint.resume != "never" else None
            resume_at(self.run, self._config, self._available, name)
            self._keep_snapshots()
        except ParamServerError as error:
            self.run.fail(error)
            return
        self._note_start()
        begin = BeginRun(self.run.name, self.run.incarnation, name, shared_config(self._config))
        self._coordinator.begin_run(begin)

    def _lost(self, shard: int) -> None:
        """What it held beyond its newest snapshot is lost, so all go back; without snapshots that is the end."""
        if self._config.checkpoint.dir is None:
            self.run.fail(
                UnreachableError(
                    f"shard {shard} was lost at version {self.run.policy.version}, and the run keeps no snapshots",
                    fix="keep some (--checkpoint-dir), and start everything again",
                )
            )
            return
        log.error("shard_lost", shard=shard, meaning="all go back to the newest snapshot that every shard has")
        self.goes_back = True
        self._go_back.set()

    async def _end_shards(self) -> None:
        """The other shards end as this one does."""
        if self._coordinator is None:
            return
        if self.goes_back:
            self._coordinator.dismiss()
            return
        error = self.run.finished.exception() if self.run.finished.done() else None
        code = error.exit_code if isinstance(error, ParamServerError) else EXIT_BUG
        await self._coordinator.stop(End(str(error), code) if error is not None else End())

    def _note_start(self) -> None:
        config, run = self._config, self.run
        rounds = {name: getattr(run.policy.options, name, None) for name in ("straggler_timeout_s", "backup_workers")}
        started = RunStarted(
            run.name,
            run.incarnation,
            config.run.mode,
            run.policy.version,
            run.policy.num_committed(),
            config.run.workers,
            run.policy.staleness_bound,
            source=run.model.source or None,
            skipped=tuple(run.skipped_snapshots),
            options={name: value for name, value in rounds.items() if value},
        )
        self._bus.publish(run.now(), started)

    async def serve(self) -> None:
        """Until every worker has finished, the run has failed, or a stop was requested."""
        ticker = asyncio.create_task(self._tick())
        reporter = asyncio.create_task(self._report())
        stop = asyncio.create_task(self.stop_requested.wait())
        back = asyncio.create_task(self._go_back.wait())
        try:
            endings: list[asyncio.Future[Any]] = [self.run.finished, stop, back]
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (ticker, reporter, stop, back):
                task.cancel()
        await self._listening.no_longer_healthy()
        self.run.drain()
        if self._snapshots is not None and not self.goes_back:
            await self._snapshots.take_last()
        # Streams that have been told end by themselves; the grace is for those that do not.
        deadline = time.monotonic() + self._config.server.drain_s
        while self.run.workers and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        tensors = await self._final_tensors()
        await self._end_shards()
        await self._listening.stop(_POLL_S)  # heartbeats never end by themselves
        self.run.tensors.close()
        if self._snapshots is not None:
            self._snapshots.close()
        self._bus.publish(self.run.now(), RunEnded(self.run.policy.version, self.run.policy.num_committed()))
        self._bus.close()
        if self.goes_back:
            return
        self._write_results(tensors)
        if self.run.finished.done():
            self.run.finished.result()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.run.tick()

    async def _report(self) -> None:
        as_json = self._config.log.format == "json"
        interval_s = self._config.server.status_interval_s if as_json else _TEXT_STATUS_S
        while True:
            await asyncio.sleep(interval_s)
            status = reports.status(self.run)
            if as_json:
                log.info("status", **status.fields())
            elif status.workers or status.waiting:
                print(status_line(status), file=sys.stderr)

    async def _final_tensors(self) -> dict[str, torch.Tensor]:
        """The weights to be saved, by name, of all shards."""
        output, model = self._config.output, self.run.model
        if output.save is None or self.goes_back or not model.has_weights:
            return {}
        if self._coordinator is None:
            return model.store.tensors(output.save_averaged)
        assert model.whole is not None
        shares = divide(model.whole, self._config.server.shards)
        here = await self.run.tensors.run(lambda: model.store.tensors(output.save_averaged))
        try:
            return await collect(self._config, self._coordinator.addresses, shares, here, output.save_averaged)
        except OutputError as error:
            if not self.run.finished.done() or self.run.finished.exception() is None:
                raise
            log.error("not_saved", reason=error.message)  # the run has an error of its own to end with
            return {}

    def _write_results(self, tensors: dict[str, torch.Tensor]) -> None:
        """Weights, summary, table; whatever has been reached is written, also after a stop."""
        if self.run.model.has_weights:
            summary = reports.summary(self.run)
            metadata = {"mode": summary.mode, "version": str(self.run.model.store.version), "run": self.run.name}
            write_results(self._config, summary, tensors, metadata)
