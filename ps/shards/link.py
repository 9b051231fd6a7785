"""A shard's side of the call Attend: its one connection to the coordinator, made again when it breaks off."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import grpc.aio

from ...common.config.schema import Config
from ...common.errors import ParamServerError, Reason, UnreachableError
from ...common.reporting.log import get_logger
from ...common.wire.protocol import SERVICE, refusal_from_status
from ...proto import parameter_server_pb2 as pb
from ..core.events import Event
from ..core.replication import Follower
from .channel import open_channel
from .messages import LINES, BeginRun, End, GoOn, Order, Register, Report

log = get_logger()

_TRY_AGAIN_S = 0.2
_FINISH_S = 2.0
# The coordinator may stand still for a while; a machine that is gone is noticed all the same.
_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # also how long an attempt to connect may take; 20 s otherwise
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
        self._lease_s = config.server.lease_s
        self._channel, self._metadata = open_channel(self._address, config.security, _OPTIONS)
        self._said: deque[Report] = deque()  # without a number: lost with the connection
        self._lasting: list[Report] = []
        self._num_calls = 0
        self._news = asyncio.Event()
        self._is_over = False  # nothing more is reported
        self._call: grpc.aio.StreamStreamCall | None = None
        self.follower: Follower | None = None  # once the run has begun

    def report(self, report: Report, *, lasts: bool = False) -> None:
        """Say what may be lost; what `lasts` is said again on every new connection."""
        if lasts:
            self._lasting.append(report)
        self._said.append(report)
        self._news.set()

    def carry(self, follower: Follower) -> None:
        """From now on what this one reports is sent, and sent again until it has been heard."""
        self.follower = follower
        follower.tape.on_put = self._news.set

    async def register(self, register: Register) -> BeginRun | End:
        """Register until the coordinator takes this shard in and says what run it is, or that it cannot begin; that
        may take as long as another shard is missing. UnreachableError when there is no coordinator for
        worker.give_up_s."""
        self._register = register
        since, waits_said = time.monotonic(), ""
        while True:
            try:
                order = await self._begin_call(register)
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
            if isinstance(order, End):
                return order
            if not isinstance(order, BeginRun):
                raise UnreachableError(f"the coordinator at {self._address} began with {type(order).__name__}")
            self._register = replace(register, run=order.run, server_incarnation=order.server_incarnation)
            return order

    async def _begin_call(self, register: Register) -> Order:
        self._num_calls += 1
        self._news.set()  # what goes out on the call before, which has broken off, ends
        self._call = self._channel.stream_stream(
            f"/{SERVICE}/Attend",
            request_serializer=pb.ShardReport.SerializeToString,
            response_deserializer=pb.ShardOrder.FromString,
        )(self._reports(register, self._num_calls), metadata=self._metadata)
        return (await self._next())[1]

    async def orders(self) -> AsyncIterator[tuple[int, Event | End]]:
        """What happens, with its number, in order; over as many connections as it takes. Raises LinkLost when the
        coordinator is gone, or is another one."""
        while True:
            try:
                number, order = await self._next()
            except LinkLost as lost:
                await self._call_again(lost)
                continue
            assert isinstance(order, Event | End), order
            yield number, order

    async def _call_again(self, lost: LinkLost) -> None:
        """The connection broke off, and the coordinator may still be there: it waits for a lease."""
        assert self.follower is not None
        tape = self.follower.tape
        log.warning("coordinator_away", address=self._address, reason=str(lost))
        deadline = time.monotonic() + self._lease_s
        while True:
            try:
                order = await self._begin_call(replace(self._register, heard=tape.num_heard))
            except LinkLost:
                if time.monotonic() >= deadline:
                    raise lost from None
                await asyncio.sleep(_TRY_AGAIN_S)
                continue
            except ParamServerError as refused:  # it has gone back, or on without this shard
                raise LinkLost(refused.message) from None
            assert isinstance(order, GoOn), order
            log.info("coordinator_back", address=self._address)
            return

    async def _next(self) -> tuple[int, Order]:
        assert self._call is not None
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            refused = refusal_from_status(error)
            if refused is not None and refused.reason is not Reason.NOT_READY:
                raise refused from None
            raise LinkLost(refused.message if refused is not None else _text(error)) from None
        if not isinstance(message, pb.ShardOrder):  # the end of the stream
            code = await self._call.code()
            if code is not grpc.StatusCode.OK:
                raise LinkLost(f"{code.name}: {await self._call.details()}")
            raise LinkLost("the coordinator has ended the connection")
        order = LINES.read(message.said)
        if self.follower is not None:
            self.follower.tape.has_been_heard(order.heard if isinstance(order, GoOn) else message.heard)
        return message.number, order

    async def _reports(self, register: Register, call: int) -> AsyncIterator[pb.ShardReport]:
        """What goes out on one connection, while there is no newer one: gRPC reads on after a call has ended."""
        self._said = deque(self._lasting)
        yield pb.ShardReport(said=LINES.write(register))
        sent = 0
        while call == self._num_calls:
            self._news.clear()
            tape = self.follower.tape if self.follower is not None else None
            heard = tape.num_heard if tape is not None else 0
            for number, report in tape.after(sent) if tape is not None else ():
                yield pb.ShardReport(number=number, heard=heard, said=LINES.write(report))
                sent = number
            while self._said:
                yield pb.ShardReport(heard=heard, said=LINES.write(self._said.popleft()))
            if self._is_over:
                return
            await self._news.wait()

    async def finish(self) -> None:
        """Nothing more is reported; returns when the coordinator has heard everything, or does not answer."""
        self._is_over = True
        self._news.set()
        with contextlib.suppress(LinkLost, ParamServerError, TimeoutError):
            async with asyncio.timeout(_FINISH_S):
                while True:
                    await self._next()

    async def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
        await self._channel.close()


def _text(error: grpc.RpcError) -> str:
    assert isinstance(error, grpc.aio.AioRpcError)
    return f"{error.code().name}: {error.details()}"
