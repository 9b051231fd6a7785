"""The process around the service: address, health, ticks, status, and what is written at the end."""

from __future__ import annotations

import asyncio
import ipaddress
import sys
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ..common.config import Config
from ..common.errors import AuthError, BindError, OutputError, UsageError
from ..common.log import get_logger
from ..common.optimizers import check_arguments
from ..common.output import check_writable, write_weights
from ..common.protocol import SERVICE
from ..common.registry import MODES
from ..common.report import report_console, summary_table
from ..common.wire import MAX_MESSAGE_BYTES
from . import reports
from .policies.base import Options, Policy
from .run import Run
from .service import ParameterServerService

log = get_logger()

_TICK_S = 0.2
# With text logs, a status line every few seconds is enough for a person.
_TEXT_STATUS_S = 5.0

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    # A peer that is frozen or cut off is noticed by unanswered pings, not by the kernel's minutes.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
)


def check_before_start(config: Config) -> None:
    """Find what would fail at the end of training before it begins."""
    check_arguments(config.optimizer.name, config.optimizer.arguments())
    for path in (config.output.save, config.output.summary):
        if path is not None:
            check_writable(path)
    host, _ = split_address(config.server.listen)
    if not is_loopback(host) and not config.server.insecure:
        raise AuthError(
            f"{config.server.listen} can be reached by other machines, and the connection is neither encrypted "
            "nor authenticated",
            fix="on a network you trust add --insecure; on one machine listen on 127.0.0.1",
        )


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT -> (host, port); [v6]:PORT too. UsageError otherwise."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"'{address}' is not HOST:PORT", fix="e.g. 127.0.0.1:50051, or [::1]:50051")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def make_policy(config: Config) -> Policy:
    """The mode's state machine with the options of the configuration."""
    policy = config.policy
    options = Options(
        steps=config.run.steps,
        num_workers=config.run.workers,
        min_workers=policy.min_workers,
        staleness=policy.staleness,
        local_steps=policy.local_steps,
        straggler_timeout_s=policy.straggler_timeout_s,
        backup_workers=policy.backup_workers,
        weighting=policy.weighting,
        extra=policy.extra,
    )
    made: Policy = MODES.load(config.run.mode)(options)
    return made


class Server:
    """One `ps-server` process. `start` binds, `serve` returns when the run is over or a stop was requested."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.stop_requested = asyncio.Event()
        self.run = Run(config, make_policy(config))
        self.address = ""
        self._grpc = grpc.aio.server(options=CHANNEL_OPTIONS)
        self._health = health.aio.HealthServicer()

    async def start(self) -> None:
        """Listen; BindError when the address cannot be had."""
        service = ParameterServerService(self.run, self._config)
        self._grpc.add_generic_rpc_handlers((service.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc)
        host, _ = split_address(self._config.server.listen)
        try:
            bound = self._grpc.add_insecure_port(self._config.server.listen)
        except RuntimeError:
            bound = 0
        if bound == 0:
            raise BindError(
                f"cannot listen on {self._config.server.listen}: port in use, or not an address of this machine",
                fix="stop the other process, or choose --listen HOST:PORT with another port (0 takes a free one)",
            )
        await self._grpc.start()
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        if not is_loopback(host):
            log.warning("insecure", address=self.address, meaning="anyone who reaches this port can read and train")
        config = self._config
        log.info("listening", address=self.address, mode=config.run.mode, steps=config.run.steps, run=self.run.name)

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
        # Streams that have been told end by themselves; the grace is for those that do not.
        await self._grpc.stop(self._config.server.drain_s)
        self.run.tensors.close()
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
        output, store = self._config.output, self.run.store
        summary = reports.summary(self.run)
        if store is None:
            return
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
