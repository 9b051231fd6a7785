"""The gRPC server of a process: its address, its limits, health and reflection."""

from __future__ import annotations

import asyncio
import contextlib

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ...common.config.addresses import join_address, split_address
from ...common.config.schema import Config
from ...common.errors import BindError
from ...common.reporting.log import get_logger
from ...common.security import read_token
from ...common.wire.frames import MAX_MESSAGE_BYTES
from ...common.wire.protocol import SERVICE, other_protocol
from .port import Port
from .security import Certificates, TokenCheck, insecurity

log = get_logger()

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    # Limits the bytes that gRPC buffers before they are read. Its own estimate could grow to the size of a large model.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 << 20),
    # Without the first option, a silent TLS connection stayed open for 40 s. Without the second, one connection ran
    # 300 handlers.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_concurrent_streams", 128),
    ("grpc.max_metadata_size", 8192),
    ("grpc.absolute_max_metadata_size", 16384),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
)


# Both options are set to one lease. The lease releases a frozen or unreachable worker. Pings must not close its
# connections earlier, because a closed connection means that the worker has ended. The second option also sets the
# kernel's limit for unacknowledged bytes. A ping waits behind the weights that were sent before it (8 MB at 10 Mbit/s
# take 6.7 s), so `ping_timeout_ms` is longer.
_PINGS_MS = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms")
_LEAST_PING_MS = 60_000
_STOP_S = 0.02
_END_S = 1.0
_RPC_TASK = "rpc_task"  # grpc.aio's name of its tasks


class Listening:
    """The gRPC server of one process. Call `bind`, then `serve`, and finally `stop`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        lease_ms, token = int(1000 * config.server.lease_s), read_token(config.security)
        pings = dict.fromkeys(_PINGS_MS, lease_ms) | {"grpc.http2.ping_timeout_ms": max(lease_ms, _LEAST_PING_MS)}
        interceptors = [TokenCheck(token)] if token is not None else []
        self._grpc = grpc.aio.server(options=[*_OPTIONS, *pings.items()], interceptors=interceptors)
        self._health = health.aio.HealthServicer()
        self.address = ""
        self.direct = Port(config)

    def bind(self) -> None:
        """Bind the address, with TLS if there is a certificate. Raises BindError."""
        listen, security = self._config.server.listen, self._config.security
        bound = 0
        with contextlib.suppress(RuntimeError):
            if security.cert is None:
                bound = self._grpc.add_insecure_port(listen)
            else:
                certificates = Certificates(security)
                tls = grpc.dynamic_ssl_server_credentials(certificates.current(), certificates, security.mutual)
                bound = self._grpc.add_secure_port(listen, tls)
        if bound == 0:
            problem = f"cannot listen on {listen}: port in use, or not an address of this machine"
            fix = "stop the other process, or choose --listen HOST:PORT with another port (0 takes a free one)"
            raise BindError(problem, fix=fix)
        self.address = join_address(split_address(listen)[0], bound)
        self.direct.open()

    async def serve(self, handler: grpc.GenericRpcHandler) -> None:
        """Start to serve calls, and report healthy."""
        self._grpc.add_generic_rpc_handlers((handler, _OtherProtocols()))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc)
        await self._grpc.start()
        await self.say_healthy(True)
        if (lacks := insecurity(self._config)) is not None:
            meaning = f"{lacks}; anyone who reaches this port can read and train"
            log.warning("insecure", address=self.address, meaning=meaning)

    async def say_healthy(self, is_healthy: bool) -> None:
        """Set the status that gRPC's health service reports."""
        status = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            await self._health.set(name, status.SERVING if is_healthy else status.NOT_SERVING)

    async def stop(self) -> None:
        """Stop serving. Heartbeats never end by themselves, so open calls get little time to end."""
        await self._grpc.stop(_STOP_S)
        await self.direct.close()
        # Wait for cancelled handlers and gRPC's own tasks. If the loop ended before them, they would log a traceback.
        ending = [task for task in asyncio.all_tasks() if task.cancelling() or task.get_name() == _RPC_TASK]
        if ending:
            await asyncio.wait(ending, timeout=_END_S)


class _OtherProtocols(grpc.GenericRpcHandler):
    """Refuses calls of older and newer versions of the protocol."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        message = other_protocol(handler_call_details.method)
        if message is None:
            return None

        async def refuse(_: object, context: grpc.aio.ServicerContext) -> None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, message)

        return grpc.stream_stream_rpc_method_handler(refuse)
