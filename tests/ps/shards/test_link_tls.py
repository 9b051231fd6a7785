"""A shard that cannot reach the coordinator because of TLS says why, in a sentence, and does not wait."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from paramserver.common.errors import AuthError
from paramserver.launch.certs.kit import issue, make_ca
from paramserver.tests.ps.shards.test_link import BEGIN, REGISTER, Calls, coordinator, link_to

from ...certificates import write

HERE = ["127.0.0.1"]
DAY = timedelta(days=1)


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


def shown(folder: Path, name: str, is_mutual: bool) -> grpc.ServerCredentials:
    """The credentials of a server that shows this certificate."""
    pair = tuple((folder / f"{name}.{part}").read_bytes() for part in ("key", "crt"))
    return grpc.ssl_server_credentials([pair], (folder / "ca.crt").read_bytes(), is_mutual)


def security(folder: Path, has_ca: bool, is_mutual: bool) -> dict[str, object]:
    """The settings of shard 1."""
    files = {"ca": f"{folder}/ca.crt", "cert": f"{folder}/shard-1.crt", "key": f"{folder}/shard-1.key"}
    return {**(files if has_ca else {}), "mutual": is_mutual}


async def register(folder: Path, coordinators: str | None, has_ca: bool, is_mutual: bool) -> object:
    """What comes of registering with a coordinator that shows this certificate, or speaks no TLS."""
    credentials = shown(folder, coordinators, is_mutual) if coordinators is not None else None
    async with (
        coordinator(Calls(BEGIN).attend, credentials) as port,
        link_to(port, **security(folder, has_ca, is_mutual)) as link,
    ):
        return await asyncio.wait_for(link.register(REGISTER), 30)


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
async def test_the_cause_is_named_at_once(
    folder: Path, coordinators: str | None, has_ca: bool, is_mutual: bool, words: str
) -> None:
    with pytest.raises(AuthError) as error:
        await register(folder, coordinators, has_ca, is_mutual)
    assert words in error.value.message
    assert error.value.fix and error.value.exit_code == 11


@pytest.mark.parametrize("is_mutual", [False, True])
async def test_with_the_coordinators_own_certificate_all_is_well(folder: Path, is_mutual: bool) -> None:
    assert await register(folder, "shard-0", True, is_mutual) == BEGIN


async def test_the_certificate_that_was_looked_at_is_the_one_that_is_trusted(folder: Path) -> None:
    """Whoever stands between lets the look through to shard 0, and takes every other connection himself, with another
    certificate of the same CA: he is told nothing."""
    coordinators = {name: Calls(BEGIN) for name in ("shard-0", "shard-2")}
    async with contextlib.AsyncExitStack() as stack:
        ports = [
            await stack.enter_async_context(coordinator(calls.attend, shown(folder, name, True)))
            for name, calls in coordinators.items()
        ]
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
        stack.callback(proxy.close)
        port = proxy.sockets[0].getsockname()[1]
        link = await stack.enter_async_context(link_to(port, **security(folder, True, True)))
        with pytest.raises(AuthError, match="shows the certificate of 'shard-2'"):
            await asyncio.wait_for(link.register(REGISTER), 30)
    assert [calls.heard for calls in coordinators.values()] == [[], []]
