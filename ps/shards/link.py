"""A shard's side of the call Attend: its connection to the coordinator, which it opens again after a failure.

Also how the coordinator collects the whole model from all shards (`gather`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc.aio
import torch

from ...common.config.addresses import split_address
from ...common.config.schema import Config
from ...common.errors import AuthError, OutputError, ParamServerError, Reason, UnreachableError, shown
from ...common.proxies import proxy_options
from ...common.reporting.log import get_logger
from ...common.reporting.output import replacing
from ...common.security import SHARD_PREFIX, Credentials, client_context, diagnose, facts_of
from ...common.tensors.layout import Layout, as_bytes, new_payload
from ...common.tensors.optimizers import TableSpec
from ...common.tensors.sharding import divide
from ...common.wire.frames import MAX_DATA_BYTES, MAX_MESSAGE_BYTES, parse
from ...common.wire.protocol import SERVICE, refusal_from_status
from ...proto import parameter_server_pb2 as pb
from ..core.events import Event
from ..core.run import Follower
from ..engine.engine import Clock, Engine
from ..snapshots.resharding import put_together
from ..wire.stream import reader_into
from .attend import LINES, BeginRun, End, GoOn, Order, Register

log = get_logger()

_TRY_AGAIN_S = 0.2
_FINISH_S = 2.0
_HANDSHAKE_S = 2.0
# The coordinator may be suspended for a while. Pings notice an unreachable machine.
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # also the time limit of a connection attempt, by default 20 s
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)


class LinkLost(Exception):
    """The coordinator is unreachable, or has ended the connection."""


def open_channel(address: str, credentials: Credentials, options: Sequence[tuple[str, int]]) -> grpc.aio.Channel:
    """Return a channel to another shard, with TLS if there is a CA."""
    if credentials.ca is None:
        return grpc.aio.insecure_channel(address, options=(*options, *proxy_options(address)))
    tls = grpc.ssl_channel_credentials(credentials.ca, credentials.key, credentials.cert)
    return grpc.aio.secure_channel(address, tls, options=(*options, *proxy_options(address)))


class Link:
    """Sends the reports in the follower's outbox until they are acknowledged, and receives orders."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self._config, self._clock, self._address = config, clock, config.server.coordinator
        self._credentials = Credentials.read(config.security)
        self._channel = open_channel(self._address, self._credentials, _KEEPALIVE)
        self._num_calls = 0
        self._changed = asyncio.Event()
        self._is_over = False  # no more reports follow
        self._call: grpc.aio.StreamStreamCall | None = None
        self._follower: Follower | None = None  # None until the run begins

    def carry(self, follower: Follower) -> None:
        """Start to send the reports of this follower."""
        self._follower = follower
        follower.outbox.on_put = self._changed.set

    async def register(self, register: Register) -> BeginRun | End:
        """Register this shard, and return the coordinator's order to begin the run, or to end.

        This waits as long as another shard is missing. Raises UnreachableError without a coordinator for
        worker.give_up_s, and AuthError for a TLS mistake.
        """
        try:
            order = await self._begin_within(self._config.worker.give_up_s, register)
        except LinkLost as lost:
            problem = f"shard {register.shard} could not register with a coordinator at {self._address}"
            fix = "start shard 0 (ps-server --shards S), or give its address (--coordinator HOST:PORT)"
            limit = f"for {self._config.worker.give_up_s:g} s (worker.give_up_s)"
            raise UnreachableError(f"{problem} {limit}: {lost}", fix=fix) from None
        if isinstance(order, End):
            return order
        if not isinstance(order, BeginRun):
            raise UnreachableError(f"the coordinator at {self._address} began with {type(order).__name__}")
        self._register = replace(register, run=order.run, server_incarnation=order.server_incarnation)
        return order

    async def _begin_within(self, limit_s: float, register: Register) -> Order:
        """Call until the coordinator replies, and return its first order. Raises LinkLost after `limit_s`."""
        deadline, reason = self._clock.now() + limit_s, ""
        while True:
            if self._follower is not None:
                register = replace(register, num_received=self._follower.outbox.num_received)
            try:
                if self._config.security.mutual:  # shards check the names in each other's certificates
                    certificate = await asyncio.to_thread(self._certificate)
                    await self._channel.close()
                    # The call uses a new channel on which gRPC accepts only this certificate.
                    self._channel = open_channel(self._address, replace(self._credentials, ca=certificate), _KEEPALIVE)
                self._num_calls += 1
                self._changed.set()  # ends the reports of the previous call
                self._call = self._channel.stream_stream(
                    f"/{SERVICE}/Attend", pb.ShardReport.SerializeToString, pb.ShardOrder.FromString
                )(self._reports(register, self._num_calls), metadata=self._credentials.metadata)
                return (await self._next())[1]
            except LinkLost as lost:
                if self._clock.now() >= deadline:
                    raise
                if self._follower is None and str(lost) != reason:
                    reason = str(lost)
                    with contextlib.suppress(OSError):
                        mistake = await asyncio.to_thread(diagnose, self._address, self._credentials, "shard")
                        if mistake is not None:
                            raise mistake from None
                    log.info("waiting_for_coordinator", address=self._address, reason=reason)
            await self._clock.sleep(_TRY_AGAIN_S)

    def _certificate(self) -> bytes:
        """Return the coordinator's certificate, in PEM form.

        Raises AuthError if its name is not shard 0's, since TLS alone accepts any certificate of the same CA.
        """
        name, (host, port) = f"{SHARD_PREFIX}0", split_address(self._address)
        try:
            with (
                socket.create_connection((host, port), _HANDSHAKE_S) as connection,
                client_context(self._credentials).wrap_socket(connection, server_hostname=host) as secure,
            ):
                certificate = ssl.DER_cert_to_PEM_cert(secure.getpeercert(binary_form=True) or b"").encode()
        except OSError as error:
            raise LinkLost(f"{type(error).__name__}: {error}") from None
        if (found := facts_of(certificate).name) != name:
            problem = f"the server at {self._address} shows the certificate of '{found[:100]}'"
            fix = f"give the coordinator's address (--coordinator), and {name}.crt and .key to shard 0 itself"
            raise AuthError(f"{problem}, and the coordinator is '{name}'", fix=fix)
        return certificate

    async def orders(self) -> AsyncIterator[tuple[int, Event | End]]:
        """Yield the coordinator's orders with their numbers.

        Raises LinkLost if the coordinator is unreachable for a lease, or is a new process.
        """
        while True:
            try:
                number, order = await self._next()
            except LinkLost as lost:
                log.warning("coordinator_away", address=self._address, reason=str(lost))
                try:
                    # The coordinator waits for a lease.
                    order = await self._begin_within(self._config.server.lease_s, self._register)
                except LinkLost:
                    raise lost from None
                except ParamServerError as refused:  # the coordinator has gone back, or continues without this shard
                    raise LinkLost(refused.message) from None
                if not isinstance(order, GoOn):
                    raise LinkLost(f"the coordinator began again with {type(order).__name__}") from None
                log.info("coordinator_back", address=self._address)
                continue
            if not isinstance(order, Event | End):
                raise LinkLost(f"the coordinator ordered {type(order).__name__} in the middle of the run")
            yield number, order

    async def _next(self) -> tuple[int, Order]:
        assert self._call is not None
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            refused = refusal_from_status(error)
            if refused is not None and refused.reason is not Reason.NOT_READY:
                raise refused from None
            status = f"{error.code().name}: {shown(error.details() or '', 500)}"
            raise LinkLost(refused.message if refused is not None else status) from None
        if not isinstance(message, pb.ShardOrder):  # the end of the stream
            code = await self._call.code()
            if code is not grpc.StatusCode.OK:
                raise LinkLost(f"{code.name}: {shown(await self._call.details() or '', 500)}")
            raise LinkLost("the coordinator has ended the connection")
        order: Order = LINES.read(message.message)
        if self._follower is not None:
            self._follower.outbox.acknowledge(order.num_received if isinstance(order, GoOn) else message.num_received)
        return message.number, order

    async def _reports(self, register: Register, call: int) -> AsyncIterator[pb.ShardReport]:
        """Yield the reports for one call, until there is a newer call. gRPC still reads after a call has ended."""
        yield pb.ShardReport(message=LINES.write(register))
        sent = 0
        while call == self._num_calls:
            self._changed.clear()
            if self._follower is not None:
                outbox = self._follower.outbox
                for number, report in outbox.after(sent):
                    yield pb.ShardReport(number=number, num_received=outbox.num_received, message=LINES.write(report))
                    sent = number
            if self._is_over:
                return
            await self._changed.wait()

    async def finish(self) -> None:
        """End the reports, and wait until the coordinator has received all of them or does not reply."""
        self._is_over = True
        self._changed.set()
        with contextlib.suppress(LinkLost, ParamServerError, TimeoutError):
            async with asyncio.timeout(_FINISH_S):
                while True:
                    await self._next()

    async def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
        await self._channel.close()


# ---- gather --------------------------------------------------------------------------------------
# Collects the whole model from all shards for the files at the end of a run: the weights, and the tables of rows.
#
# Tables are written block by block as their rows arrive, so no process needs more memory than before.


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
