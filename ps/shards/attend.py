"""The coordinator's side of the call Attend: reports in, orders out, one call for each other shard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from urllib.parse import unquote

import grpc.aio

from ...common.errors import ParamServerError, Reason, refusal
from ...common.reporting.log import get_logger
from ...common.security import split_address
from ...common.wire.protocol import refusal_to_status
from ...proto import parameter_server_pb2 as pb
from ..wire.security import check_shard
from . import orders
from .coordinator import Attendant, Coordinator
from .messages import order_to_proto, report_from_proto

log = get_logger()

_ANY_HOST = ("0.0.0.0", "::")


async def attend(
    coordinator: Coordinator, reports: AsyncIterator[pb.ShardReport], context: grpc.aio.ServicerContext
) -> None:
    """One shard's whole life: it registers, reports, is told. Ends with its last order, or with the shard."""
    attendant: Attendant | None = None
    shard = -1
    try:
        first = await anext(reports, None)
        if first is None:
            return
        register = report_from_proto(first)
        if not isinstance(register, orders.Register):
            raise refusal(Reason.BAD_REQUEST, "the first report of a shard is not Register")
        shard = register.shard
        check_shard(context, shard)
        attendant = coordinator.register(replace(register, address=_reachable(register.address, context.peer())))
        tasks = [
            asyncio.create_task(_hear(coordinator, shard, attendant, reports)),
            asyncio.create_task(_tell(attendant, context)),
        ]
        try:
            for done in (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0]:
                done.result()
        finally:
            for task in tasks:
                task.cancel()
    except ParamServerError as error:
        log.warning("refused", shard=shard, reason=(error.reason or Reason.BAD_REQUEST).value, message=error.message)
        await context.abort(*refusal_to_status(error))
    finally:
        if attendant is not None:
            coordinator.lost(shard, attendant)


async def _hear(
    coordinator: Coordinator, shard: int, attendant: Attendant, reports: AsyncIterator[pb.ShardReport]
) -> None:
    async for message in reports:
        coordinator.hear(shard, attendant, report_from_proto(message))


async def _tell(attendant: Attendant, context: grpc.aio.ServicerContext) -> None:
    """Send what the shard is to be told, until None."""
    while (item := await attendant.outbox.get()) is not None:
        await context.write(order_to_proto(*item))


def _reachable(address: str, peer: str) -> str:
    """Where workers find a shard that listens on all addresses: where it comes from."""
    host, port = split_address(address)
    if host not in _ANY_HOST:
        return address
    kind, _, rest = unquote(peer).partition(":")
    return f"{rest.rpartition(':')[0]}:{port}" if kind in ("ipv4", "ipv6") else f"127.0.0.1:{port}"
