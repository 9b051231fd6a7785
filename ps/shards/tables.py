"""The tables of rows in a file, block by block as rows are pulled: no process has more of them than it had."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import grpc.aio
import torch

from ...common.config.schema import Config
from ...common.errors import OutputError
from ...common.reporting.log import get_logger
from ...common.reporting.output import replacing
from ...common.security import Credentials
from ...common.tensors.layout import as_bytes
from ...common.tensors.optimizers import TableSpec
from ...common.wire.frames import MAX_DATA_BYTES, MAX_MESSAGE_BYTES
from ...common.wire.protocol import SERVICE
from ...proto import parameter_server_pb2 as pb
from ..engine.engine import Engine
from .link import open_channel

log = get_logger()

_TIMEOUT_S = 300.0
_OPTIONS = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),)
_NOBODY = 2**32 - 1  # whose bytes are not counted
_NAMES = {"float64": "F64", "float32": "F32"}


async def write_tables(config: Config, engine: Engine) -> None:
    """All rows of all shards, by the names of the tables, to `output.tables`. OutputError where they cannot be had or
    written."""
    path, optimizer = config.output.tables, engine.model.whole_optimizer
    assert path is not None and optimizer is not None
    metadata = {"mode": config.run.mode, "version": str(engine.run.policy.version), "run": engine.run.name}
    # Wider numbers first, so that all of them lie at a multiple of their size.
    tables = sorted(enumerate(optimizer.tables), key=lambda table: table[1].dtype, reverse=True)
    try:
        with replacing(Path(path)) as file:
            file.write(_header([table for _, table in tables], metadata))
            async for block in _blocks(config, engine, tables):
                await asyncio.to_thread(file.write, block)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}", fix="free some space and run again") from None
    log.info("saved", path=path, version=engine.run.policy.version)


def _header(tables: list[TableSpec], metadata: dict[str, str]) -> bytes:
    """What a safetensors file begins with."""
    entries: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for table in tables:
        end = at + table.num_rows * table.row_bytes
        shape = [table.num_rows, table.dim]
        entries[table.name] = {"dtype": _NAMES[table.dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


async def _blocks(config: Config, engine: Engine, tables: list[tuple[int, TableSpec]]) -> AsyncIterator[bytes]:
    credentials, addresses = Credentials.read(config.security), engine.shard_addresses or ("",)
    held = engine.model.store.tables
    assert held is not None
    async with contextlib.AsyncExitStack() as channels:
        asks = []
        for address in addresses[1:]:
            channel = await channels.enter_async_context(open_channel(address, credentials, _OPTIONS))
            asks.append(_asking(channel))
        for number, table in tables:
            for shard, address in enumerate(addresses):
                part = table.part(shard, len(addresses))
                for first in range(part.first, part.end, at_once := MAX_DATA_BYTES // table.row_bytes):
                    ids = bytes(as_bytes(torch.arange(first, min(part.end, first + at_once))))
                    if not shard:
                        yield await engine.tensors.run(partial(held.pull, number, ids, MAX_DATA_BYTES))
                        continue
                    request = pb.RowsRequest(run=engine.run.name, rank=_NOBODY, table=number, ids=ids)
                    try:
                        reply = await asks[shard - 1](request, timeout=_TIMEOUT_S, metadata=credentials.metadata)
                    except grpc.aio.AioRpcError as error:
                        what = f"shard {shard} at {address} did not give its rows of table '{table.name}'"
                        raise OutputError(
                            f"{what}: {error.details()}", fix="they are in its newest snapshot, if snapshots are kept"
                        ) from None
                    yield reply.rows


def _asking(channel: grpc.aio.Channel) -> grpc.aio.UnaryUnaryMultiCallable:
    return channel.unary_unary(
        f"/{SERVICE}/PullRows",
        request_serializer=pb.RowsRequest.SerializeToString,
        response_deserializer=pb.RowsReply.FromString,
    )
