"""The process around the service: address, health, ticks, status, and what is written at the end."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ..common.config import Config
from ..common.errors import BindError, OutputError
from ..common.history import History
from ..common.log import get_logger
from ..common.optimizers import check_arguments
from ..common.output import check_writable, write_weights
from ..common.protocol import SERVICE
from ..common.registry import MODES, check_contributions, check_pipelined
from ..common.report import report_console, summary_table
from ..common.security import split_address
from ..common.wire import MAX_MESSAGE_BYTES
from . import reports
from .checkpoint import Loaded
from .policies.base import Options, Policy
from .run import Run
from .security import bind, check_security, insecurity, interceptors, security_text
from .service import ParameterServerService
from .snapshots import Snapshots, resume

log = get_logger()

_TICK_S = 0.2
_POLL_S = 0.02
# With text logs, a status line every few seconds is enough for a person.
_TEXT_STATUS_S = 5.0

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    # What a worker may send before it is read: gRPC's own estimate lets it grow to a large model's size.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 << 20),
    # Who says nothing is not waited for, who asks for everything does not get it: a silent TLS connection was open
    # for 40 s without the first, 300 handlers of one connection ran without the second.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_concurrent_streams", 128),
    ("grpc.max_metadata_size", 8192),
    ("grpc.absolute_max_metadata_size", 16384),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
)


def channel_options(lease_s: float) -> tuple[tuple[str, int], ...]:
    """A peer that is frozen or cut off is noticed by its lease. Pings nobody answers close what is left of its
    connections, not before: a closed connection is a worker that has ended."""
    lease_ms = int(1000 * lease_s)
    return (
        *CHANNEL_OPTIONS,
        ("grpc.keepalive_time_ms", lease_ms),
        ("grpc.keepalive_timeout_ms", lease_ms),  # also the kernel's limit for unacknowledged bytes
        ("grpc.http2.ping_timeout_ms", lease_ms),
    )


def check_before_start(config: Config) -> None:
    """Find what would fail at the end of training before it begins."""
    check_arguments(config.optimizer.name, config.optimizer.arguments())
    for path in (config.output.save, config.output.summary):
        if path is not None:
            check_writable(path)
    check_security(config)


def make_policy(config: Config) -> Policy:
    """The mode's state machine with the options of the configuration."""
    policy = config.policy
    if policy.pipelined:
        check_pipelined(config.run.mode, policy.staleness)
    check_contributions(config.run.mode, policy.aggregation, config.store.max_norm)
    options = Options(
        steps=config.run.steps,
        num_workers=config.run.workers,
        min_workers=policy.min_workers,
        staleness=policy.staleness,
        local_steps=policy.local_steps,
        straggler_timeout_s=policy.straggler_timeout_s,
        backup_workers=policy.backup_workers,
        weighting=policy.weighting,
        pipelined=policy.pipelined,
        extra=policy.extra,
    )
    made: Policy = MODES.load(config.run.mode)(options)
    return made


class Server:
    """One `ps-server` process. `start` binds, `serve` returns when the run is over or a stop was requested."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.stop_requested = asyncio.Event()
        self._history = History(config.output.history, "server")
        self.run = Run(config, make_policy(config), history=self._history)
        self._snapshots: Snapshots | None = None
        self.address = ""
        self._grpc = grpc.aio.server(options=channel_options(config.server.lease_s), interceptors=interceptors(config))
        self._health = health.aio.HealthServicer()

    async def start(self) -> None:
        """Go on from a snapshot, if there is one, and listen; BindError when the address cannot be had."""
        loaded = resume(self.run, self._config)
        if self._config.checkpoint.dir is not None:
            self._snapshots = Snapshots(self.run, self._config)
        service = ParameterServerService(self.run, self._config)
        self._grpc.add_generic_rpc_handlers((service.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc)
        host, _ = split_address(self._config.server.listen)
        bound = bind(self._grpc, self._config)
        if bound == 0:
            raise BindError(
                f"cannot listen on {self._config.server.listen}: port in use, or not an address of this machine",
                fix="stop the other process, or choose --listen HOST:PORT with another port (0 takes a free one)",
            )
        self._note_start(loaded)
        await self._grpc.start()
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        if (meaning := insecurity(self._config)) is not None:
            log.warning("insecure", address=self.address, meaning=meaning)
        config = self._config
        log.info(
            "listening",
            address=self.address,
            security=security_text(config),
            mode=config.run.mode,
            steps=config.run.steps,
            run=self.run.name,
        )

    def _note_start(self, loaded: Loaded | None) -> None:
        config, run = self._config, self.run
        policy = config.policy
        rounds = {"straggler_timeout_s": policy.straggler_timeout_s, "backup_workers": policy.backup_workers}
        self._history.write(
            "start",
            run=run.name,
            server_incarnation=run.incarnation,
            mode=config.run.mode,
            staleness=run.policy.staleness_bound,
            workers=config.run.workers,
            version=run.policy.version,
            steps=run.policy.committed_steps(),
            source=str(loaded.path) if loaded is not None else None,
            skipped=run.skipped_snapshots,
            **{name: value for name, value in rounds.items() if value},
        )

    async def serve(self) -> None:
        """Until every worker has finished, the run has failed, or a stop was requested."""
        ticker = asyncio.create_task(self._tick())
        reporter = asyncio.create_task(self._report())
        stop = asyncio.create_task(self.stop_requested.wait())
        try:
            endings: list[asyncio.Future[Any]] = [self.run.finished, stop]
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (ticker, reporter, stop):
                task.cancel()
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        self.run.drain()
        if self._snapshots is not None:
            await self._snapshots.take_last()
        # Streams that have been told end by themselves; the grace is for those that do not.
        deadline = time.monotonic() + self._config.server.drain_s
        while self.run.workers and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        await self._grpc.stop(_POLL_S)  # heartbeats never end by themselves
        self.run.tensors.close()
        if self._snapshots is not None:
            self._snapshots.close()
        self._history.write("end", version=self.run.policy.version, steps=self.run.policy.committed_steps())
        self._history.close()
        self._write_results()
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
                log.info("status", **status)
            elif status["workers"] or status["waiting"]:
                losses = [row["loss"] for row in status["workers"] if row["loss"] is not None]
                loss = f"  loss {sum(losses) / len(losses):.4f}" if losses else ""
                waiting = f"  waiting: {status['waiting']}" if status["waiting"] else ""
                print(
                    f"step {status['step']}/{status['steps']}  version {status['version']}{loss}{waiting}",
                    file=sys.stderr,
                )

    def _write_results(self) -> None:
        """Weights, summary, table; whatever has been reached is written, also after a stop."""
        output = self._config.output
        summary = reports.summary(self.run)
        if not self.run.model.has_weights:
            return
        store = self.run.model.store
        try:
            if output.save is not None:
                metadata = {"mode": summary.mode, "version": str(store.version), "run": self.run.name}
                write_weights(output.save, store.tensors(output.save_averaged), metadata)
                log.info("saved", path=output.save, version=store.version)
            if output.summary is not None:
                summary.write(output.summary)
        except OSError as error:
            raise OutputError(f"cannot write the results: {error}", fix="free some space and run again") from None
        if self._config.log.format == "json":
            log.info("summary", **summary.model_dump())
        else:
            report_console(sys.stdout).print(summary_table(summary))
