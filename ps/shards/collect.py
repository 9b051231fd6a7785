"""The whole model, from all shards, for the file of final weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc.aio
import torch

from ...common.config.schema import Config
from ...common.errors import OutputError
from ...common.security import Credentials
from ...common.tensors.layout import Layout, as_bytes, new_payload
from ...common.tensors.sharding import divide
from ...common.wire.frames import MAX_MESSAGE_BYTES, PayloadReader, parse
from ...common.wire.protocol import SERVICE
from ...proto import parameter_server_pb2 as pb
from ..snapshots.resharding import put_together
from .link import open_channel

# Until the first message, which may wait for others' pulls, and between two of 1 MiB: of a whole model no total is one.
_FIRST_S, _PROGRESS_S = 300.0, 60.0
_OPTIONS = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),)


async def collect(
    config: Config,
    addresses: Sequence[str],
    whole: Layout,
    here: dict[str, torch.Tensor],
    *,
    averaged: bool = False,
    version: int | None = None,
) -> dict[str, torch.Tensor]:
    """Every tensor of the model by name, aliases included; `here` are those of shard 0, by the names of its parts.
    Of the Polyak average, or of a `version` that all keep, or of the newest.

    Raises OutputError for a shard that does not reply.
    """
    held, credentials = [here], Credentials.read(config.security)
    request = pb.PullRequest(averaged=averaged, version=version)
    shares = divide(whole, len(addresses))
    for shard, address in enumerate(addresses[1:], start=1):
        try:
            held.append(await _pull(address, credentials, shares[shard].layout, request))
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            text = error.details() if isinstance(error, grpc.aio.AioRpcError) else "no reply"
            raise OutputError(
                f"shard {shard} at {address} did not give its part of the weights: {text}",
                fix="the final ones are in its newest snapshot, if snapshots are kept",
            ) from None
    found = put_together(held, shares, divide(whole, 1)[0])
    return {name: found[spec.name].clone() for spec in whole.specs for name in (spec.name, *spec.aliases)}


async def _pull(
    address: str, credentials: Credentials, layout: Layout, request: pb.PullRequest
) -> dict[str, torch.Tensor]:
    payload = new_payload(layout.total_bytes)
    target = as_bytes(payload)

    def write(offset: int, data: memoryview) -> None:
        target[offset : offset + len(data)] = data

    reader = PayloadReader(layout.total_bytes, write)
    async with open_channel(address, credentials, _OPTIONS) as channel:
        pull = channel.unary_stream(f"/{SERVICE}/Pull", pb.PullRequest.SerializeToString)
        async with asyncio.timeout(_FIRST_S) as deadline:
            async for raw in pull(request, metadata=credentials.metadata):
                deadline.reschedule(asyncio.get_running_loop().time() + _PROGRESS_S)
                reader.feed(parse(pb.ServerMessage, raw))
    return {spec.name: tensor for spec, tensor in layout.views(payload)}
