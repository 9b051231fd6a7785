"""Collects the whole model from all shards for the files at the end of a run: the weights, and the tables of rows.

Tables are written block by block as their rows arrive, so no process needs more memory than before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import grpc.aio
import torch

from ...common.errors import OutputError
from ...common.reporting.log import get_logger
from ...common.reporting.output import replacing
from ...common.security import Credentials
from ...common.tensors.layout import Layout, as_bytes, new_payload
from ...common.tensors.optimizers import TableSpec
from ...common.tensors.sharding import divide
from ...common.wire.frames import MAX_DATA_BYTES, MAX_MESSAGE_BYTES, parse
from ...common.wire.protocol import SERVICE
from ...proto import parameter_server_pb2 as pb
from ..engine.engine import Engine
from ..snapshots.resharding import put_together
from ..wire.stream import reader_into
from .link import open_channel

log = get_logger()

# Time limits for the first message, which may wait for other pulls, and between two messages of 1 MiB. The transfer of
# a whole model has no limit.
_FIRST_S, _PROGRESS_S = 300.0, 60.0
_OPTIONS = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),)
_NOBODY = 2**32 - 1  # a rank that no worker has, so that the bytes are not counted
_DTYPES = {"float64": "F64", "float32": "F32"}  # names in safetensors
_FIX = "use the shard's newest snapshot, if snapshots are kept"


# ---- weights ------------------------------------------------------------------------------------


async def collect(
    engine: Engine, local_tensors: dict[str, torch.Tensor], averaged: bool = False, version: int | None = None
) -> dict[str, torch.Tensor]:
    """Return every tensor of the model by name, with aliases.

    `local_tensors` are the tensors of shard 0, by the names of its parts. The tensors are of the Polyak average
    (`averaged`), of a `version` that all shards keep, or of the newest version. Raises OutputError if a shard does not
    reply.
    """
    config, model, addresses = engine.config, engine.model, engine.shard_addresses
    parts, credentials, whole = [local_tensors], Credentials.read(config.security), model.whole
    assert whole is not None
    request = pb.PullRequest(averaged=averaged, version=version)
    shares = divide(whole, len(addresses))
    for shard, address in enumerate(addresses[1:], start=1):
        try:
            parts.append(await _pull(address, credentials, shares[shard].layout, request))
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            text = error.details() if isinstance(error, grpc.aio.AioRpcError) else "no reply"
            problem = f"shard {shard} at {address} did not send its part of the weights: {text}"
            raise OutputError(problem, fix=_FIX) from None
    tensors = put_together(parts, shares, divide(whole, 1)[0])
    return {name: tensors[spec.name].clone() for spec in whole.specs for name in (spec.name, *spec.aliases)}


async def _pull(
    address: str, credentials: Credentials, layout: Layout, request: pb.PullRequest
) -> dict[str, torch.Tensor]:
    payload = new_payload(layout.total_bytes)
    reader = reader_into(as_bytes(payload))
    async with open_channel(address, credentials, _OPTIONS) as channel:
        pull = channel.unary_stream(f"/{SERVICE}/Pull", pb.PullRequest.SerializeToString)
        async with asyncio.timeout(_FIRST_S) as deadline:
            async for raw in pull(request, metadata=credentials.metadata):
                deadline.reschedule(asyncio.get_running_loop().time() + _PROGRESS_S)
                reader.feed(parse(pb.ServerMessage, raw))
    return {spec.name: tensor for spec, tensor in layout.views(payload)}


# ---- tables of rows -------------------------------------------------------------------------------


async def write_tables(engine: Engine) -> None:
    """Write all rows of all shards to `output.tables`, by the names of the tables. Raises OutputError."""
    run, config, model = engine.run, engine.config, engine.model
    path, optimizer = config.output.tables, model.whole_optimizer
    assert path is not None
    metadata = {"mode": run.mode, "version": str(run.policy.version), "run": run.name}
    # Wider dtypes come first, so that every number is at a multiple of its size.
    tables = sorted(enumerate(optimizer.tables), key=lambda table: table[1].dtype, reverse=True)
    try:
        with replacing(Path(path)) as file:
            file.write(_header([table for _, table in tables], metadata))
            async for block in _blocks(engine, tables):
                await asyncio.to_thread(file.write, block)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}", fix="free some space and run again") from None
    log.info("saved", path=path, version=run.policy.version)


def _header(tables: list[TableSpec], metadata: dict[str, str]) -> bytes:
    """Return the header of a safetensors file."""
    entries: dict[str, object] = {"__metadata__": metadata}
    start = 0
    for table in tables:
        end = start + table.num_rows * table.row_bytes
        shape = [table.num_rows, table.dim]
        entries[table.name] = {"dtype": _DTYPES[table.dtype], "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


async def _blocks(engine: Engine, tables: list[tuple[int, TableSpec]]) -> AsyncIterator[bytes]:
    """Yield the rows of all tables, in order."""
    run, config, model, tensors = engine.run, engine.config, engine.model, engine.tensors
    own_tables, addresses = model.store.tables, engine.shard_addresses or ("",)
    assert own_tables is not None
    credentials = Credentials.read(config.security)
    async with contextlib.AsyncExitStack() as channels:
        calls = []
        for address in addresses[1:]:
            channel = await channels.enter_async_context(open_channel(address, credentials, _OPTIONS))
            to_raw, from_raw = pb.RowsRequest.SerializeToString, pb.RowsReply.FromString
            calls.append(channel.unary_unary(f"/{SERVICE}/PullRows", to_raw, from_raw))
        for index, table in tables:
            for shard, address in enumerate(addresses):
                part = table.part(shard, len(addresses))
                for first in range(part.first, part.end, at_once := MAX_DATA_BYTES // table.row_bytes):
                    ids = bytes(as_bytes(torch.arange(first, min(part.end, first + at_once))))
                    if not shard:
                        yield await tensors.run(partial(own_tables.pull, index, ids, MAX_DATA_BYTES))
                        continue
                    request = pb.RowsRequest(run=run.name, rank=_NOBODY, table=index, ids=ids)
                    try:
                        reply = await calls[shard - 1](request, timeout=_FIRST_S, metadata=credentials.metadata)
                    except grpc.aio.AioRpcError as error:
                        problem = f"shard {shard} at {address} did not send its rows of table '{table.name}'"
                        raise OutputError(f"{problem}: {error.details()}", fix=_FIX) from None
                    yield reply.rows
