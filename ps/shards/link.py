"""A shard's side of the call Attend: its one connection to the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from ...common.config.schema import Config
from ...common.errors import ParamServerError, Reason, UnreachableError
from ...common.reporting.log import get_logger
from ...common.wire.protocol import SERVICE, refusal_from_status
from ...proto import parameter_server_pb2 as pb
from . import orders
from .channel import open_channel
from .messages import order_from_proto, report_to_proto

log = get_logger()

_TRY_AGAIN_S = 0.2
_FINISH_S = 2.0
# The coordinator may stand still for a while; a machine that is gone is noticed all the same.
_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)


class LinkLost(Exception):
    """The coordinator is gone, or wants nothing more of this shard."""


class Link:
    """Reports go out as they are given, orders come in."""

    def __init__(self, config: Config) -> None:
        self._address = config.server.coordinator
        self._give_up_s = config.worker.give_up_s
        self._channel, self._metadata = open_channel(self._address, config.security, _OPTIONS)
        self._outgoing: asyncio.Queue[orders.Report | None] = asyncio.Queue()
        self._call: Any = None

    def report(self, report: orders.Report) -> None:
        self._outgoing.put_nowait(report)

    async def register(self, register: orders.Register) -> orders.BeginRun:
        """Register until the coordinator takes this shard in and says what run it is; that may take as long as
        another shard is missing. UnreachableError when there is no coordinator for worker.give_up_s."""
        since, waits_said = time.monotonic(), ""
        while True:
            self._outgoing = asyncio.Queue()
            self.report(register)
            self._call = self._channel.stream_stream(
                f"/{SERVICE}/Attend",
                request_serializer=pb.ShardReport.SerializeToString,
                response_deserializer=pb.ShardOrder.FromString,
            )(self._reports(self._outgoing), metadata=self._metadata)
            try:
                order = await self._next()
            except LinkLost as lost:
                waited_s = time.monotonic() - since
                if waited_s >= self._give_up_s:
                    raise UnreachableError(
                        f"shard {register.shard} has not been taken in by a coordinator at {self._address} for "
                        f"{waited_s:.0f} s (worker.give_up_s is {self._give_up_s:g}): {lost}",
                        fix="start shard 0 (ps-server --shards S), or give its address (--coordinator HOST:PORT)",
                    ) from None
                if str(lost) != waits_said:
                    waits_said = str(lost)
                    log.info("waiting_for_coordinator", address=self._address, reason=waits_said)
                await asyncio.sleep(_TRY_AGAIN_S)
                continue
            if not isinstance(order, orders.BeginRun):
                raise UnreachableError(f"the coordinator at {self._address} began with {type(order).__name__}")
            return order

    async def events(self) -> AsyncIterator[tuple[orders.Event, float]]:
        """What happens, in order, with the coordinator's time. Raises LinkLost when it is gone."""
        while True:
            order = await self._next()
            assert not isinstance(order, orders.BeginRun)
            yield order, self._now

    async def _next(self) -> orders.Order:
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            refused = refusal_from_status(error)
            if refused is not None and refused.reason is not Reason.NOT_READY:
                raise refused from None
            raise LinkLost(refused.message if refused is not None else _text(error)) from None
        if message is grpc.aio.EOF:
            code = await self._call.code()
            if code is not grpc.StatusCode.OK:
                raise LinkLost(f"{code.name}: {await self._call.details()}")
            raise LinkLost("the coordinator has ended the connection")
        self._now = message.now
        return order_from_proto(message)

    @staticmethod
    async def _reports(outgoing: asyncio.Queue[orders.Report | None]) -> AsyncIterator[pb.ShardReport]:
        while (report := await outgoing.get()) is not None:
            yield report_to_proto(report)

    async def finish(self) -> None:
        """Nothing more is reported; returns when the coordinator has heard everything, or does not answer."""
        self._outgoing.put_nowait(None)
        with contextlib.suppress(LinkLost, ParamServerError, TimeoutError):
            async with asyncio.timeout(_FINISH_S):
                while True:
                    await self._next()

    async def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
        await self._channel.close()


def _text(error: Any) -> str:
    return f"{error.code().name}: {error.details()}"
