"""A shard that cannot reach the coordinator because of TLS says why, in a sentence, and does not wait."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest

from paramserver.common.config.schema import Config
from paramserver.common.errors import AuthError
from paramserver.launch.certs.kit import issue, make_ca
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.engine.clock import Clock
from paramserver.ps.shards.link import Link
from paramserver.ps.shards.messages import LINES, BeginRun, Register

from ...certificates import write

HERE = ["127.0.0.1"]
DAY = timedelta(days=1)
BEGIN = BeginRun("r", 1, None, "{}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of one CA, and of another."""
    folder, now = tmp_path_factory.mktemp("certificates"), datetime.now(UTC)
    ca, other = make_ca("our CA", 9), make_ca("their CA", 9)
    for name in ("shard-0", "shard-1", "shard-2"):
        write(folder, name, issue(ca, name, 9, HERE))
    write(folder, "expired", issue(ca, "shard-0", 1, HERE, now - 2 * DAY))
    write(folder, "foreign", issue(other, "shard-0", 9, HERE))
    write(folder, "ca", ca)
    return folder


async def _attend(reports, context) -> None:
    assert isinstance(LINES.read((await anext(reports)).message), Register)
    await context.write(pb.ShardOrder(message=LINES.write(BEGIN)))


def register(folder: Path, coordinators: str | None, has_ca: bool, is_mutual: bool) -> object:
    """What comes of registering with a coordinator that shows this certificate, or speaks no TLS."""

    async def main() -> object:
        server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(
            _attend, pb.ShardReport.FromString, pb.ShardOrder.SerializeToString
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("paramserver.v4.ParameterServer", {"Attend": handler}),)
        )
        if coordinators is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            pair = tuple((folder / f"{coordinators}.{part}").read_bytes() for part in ("key", "crt"))
            ca = (folder / "ca.crt").read_bytes()
            port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair], ca, is_mutual))
        await server.start()
        files = {"ca": f"{folder}/ca.crt", "cert": f"{folder}/shard-1.crt", "key": f"{folder}/shard-1.key"}
        config = Config(
            server={"shard": 1, "shards": 2, "coordinator": f"127.0.0.1:{port}"},
            security={**(files if has_ca else {}), "mutual": is_mutual},
            worker={"give_up_s": 60},
        )
        link = Link(config, Clock())
        try:
            return await asyncio.wait_for(link.register(Register(1, 2, "127.0.0.1:1")), 30)
        finally:
            await link.close()
            await server.stop(0)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("coordinators", "has_ca", "is_mutual", "words"),
    [
        ("foreign", True, False, "was signed by 'their CA', and not by the CA in"),
        ("expired", True, False, "expired on 20"),
        (None, True, False, "speaks no TLS, and security.ca of this shard requires it"),
        ("shard-0", False, False, "speaks TLS, and this shard has no CA certificate"),
        ("shard-2", True, True, "shows the certificate of 'shard-2', and the coordinator is 'shard-0'"),
    ],
)
def test_the_cause_is_named_at_once(
    folder: Path, coordinators: str | None, has_ca: bool, is_mutual: bool, words: str
) -> None:
    with pytest.raises(AuthError) as error:
        register(folder, coordinators, has_ca, is_mutual)
    assert words in error.value.message
    assert error.value.fix and error.value.exit_code == 11


@pytest.mark.parametrize("is_mutual", [False, True])
def test_with_the_coordinators_own_certificate_all_is_well(folder: Path, is_mutual: bool) -> None:
    assert register(folder, "shard-0", True, is_mutual) == BEGIN


def test_the_certificate_that_was_looked_at_is_the_one_that_is_trusted(folder: Path) -> None:
    """Whoever stands between lets the look through to shard 0, and takes every other connection himself, with another
    certificate of the same CA: he is told nothing."""
    certificates: list[object] = []

    async def main() -> None:
        servers, ports = [], []
        for name in ("shard-0", "shard-2"):
            server = grpc.aio.server()

            async def attend(reports, context, name=name) -> None:
                certificates.append((name, LINES.read((await anext(reports)).message)))
                await context.write(pb.ShardOrder(message=LINES.write(BEGIN)))

            handler = grpc.stream_stream_rpc_method_handler(
                attend, pb.ShardReport.FromString, pb.ShardOrder.SerializeToString
            )
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler("paramserver.v4.ParameterServer", {"Attend": handler}),)
            )
            pair = tuple((folder / f"{name}.{part}").read_bytes() for part in ("key", "crt"))
            credentials = grpc.ssl_server_credentials([pair], (folder / "ca.crt").read_bytes(), True)
            ports.append(server.add_secure_port("127.0.0.1:0", credentials))
            await server.start()
            servers.append(server)
        targets = iter([ports[0]])

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection("127.0.0.1", next(targets, ports[1]))

            async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
                with contextlib.suppress(OSError):
                    while data := await source.read(1 << 16):
                        target.write(data)
                target.close()

            await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

        proxy = await asyncio.start_server(between, "127.0.0.1", 0)
        files = {"ca": f"{folder}/ca.crt", "cert": f"{folder}/shard-1.crt", "key": f"{folder}/shard-1.key"}
        config = Config(
            server={"shard": 1, "shards": 2, "coordinator": f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"},
            security={**files, "mutual": True},
            worker={"give_up_s": 60},
        )
        link = Link(config, Clock())
        try:
            with pytest.raises(AuthError, match="shows the certificate of 'shard-2'"):
                await asyncio.wait_for(link.register(Register(1, 2, "127.0.0.1:1")), 30)
        finally:
            await link.close()
            proxy.close()
            for server in servers:
                await server.stop(0)

    asyncio.run(main())
    assert certificates == []
