"""What a worker says of a mistake in TLS, at once and with a way out; and what it refuses before it connects."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from paramserver.common.config.schema import Config, SecurityConfig
from paramserver.common.errors import AuthError
from paramserver.common.security import PLAINTEXT, Credentials, diagnose, read_pem
from paramserver.launch.certs.kit import Identity, issue, make_ca
from paramserver.worker.conversation.channel import Channel, Lost, worker_credentials

from ..certificates import secured, write

AT_ONCE_S = 3.0


@contextmanager
def grpc_server(identity: Identity | None, client_ca: bytes | None = None) -> Iterator[str]:
    """A gRPC server with this certificate (None: in the clear); with `client_ca` it asks for the worker's."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    if identity is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        pair = (identity.key_pem, identity.certificate_pem)
        port = server.add_secure_port(
            "127.0.0.1:0", grpc.ssl_server_credentials([pair], client_ca, client_ca is not None)
        )
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two CAs and what they signed; files of the workers in `folder`."""
    folder, now, day = tmp_path_factory.mktemp("world"), datetime.now(UTC), timedelta(days=1)
    ca, other = make_ca("our CA", 9), make_ca("their CA", 9)
    write(folder, "ca", ca)
    write(folder, "worker", issue(ca, "worker", 9))
    write(folder, "stranger", issue(other, "worker", 9))
    here = ["127.0.0.1"]
    return {
        "folder": folder, "ca": ca.certificate_pem,
        "good": issue(ca, "server", 9, here),
        "expired": issue(ca, "server", 1, here, begins=now - 2 * day),
        "future": issue(ca, "server", 1, here, begins=now + day),
        "foreign": issue(other, "server", 9, here),
        "elsewhere": issue(ca, "server", 9, ["gpu.lab", "10.0.0.5"]),
        "plaintext": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("server", "is_mutual", "worker", "words", "fix"),
    [
        ("expired", False, "worker", "the certificate of the server at {} expired on 20", "--renew"),
        ("future", False, "worker", "the certificate of the server at {} is valid only from 20", "clocks"),
        ("foreign", False, "worker", "was signed by 'their CA', and not by the CA in {folder}/ca.crt", "copy ca.crt"),
        ("elsewhere", False, "worker", "is for gpu.lab, 10.0.0.5; not for 127.0.0.1", "--renew --host 127.0.0.1"),
        ("plaintext", False, "worker", "the server at {} speaks no TLS", "ps-server with --cert and --key"),
        ("good", False, None, "the server at {} speaks TLS", "--ca FILE"),
        ("good", True, None, "the server at {} speaks TLS", "--ca FILE"),
        ("good", True, "", "the server at {} asks for a worker's certificate", "--cert and --key"),
        ("good", True, "stranger", "refused the certificate {folder}/stranger.crt ('worker', signed by 'their CA')",
         "use one that the server's CA"),
    ],
)  # fmt: skip
def test_every_mistake_has_its_name(
    world: dict[str, Any], server: str, is_mutual: bool, worker: str | None, words: str, fix: str
) -> None:
    folder = world["folder"]
    with grpc_server(world[server], world["ca"] if is_mutual else None) as address:
        client = Channel(address, security_of(folder, worker))
        began = time.monotonic()
        with pytest.raises(AuthError) as mistake:
            client.connect(timeout_s=20)
        assert time.monotonic() - began < AT_ONCE_S
        client.close()
    assert words.format(address, folder=folder) in mistake.value.message
    assert fix in mistake.value.fix
    assert mistake.value.exit_code == 11


def security_of(folder: Path, worker: str | None) -> Credentials:
    """None: in the clear; "": with the CA only."""
    if worker is None:
        return PLAINTEXT
    if worker:
        return secured(folder, worker, None)
    config = SecurityConfig(ca=f"{folder}/ca.crt")
    return read_pem(config)


@pytest.mark.parametrize(
    ("token", "words", "fix"),
    [
        (None, "the server at {} speaks TLS, and this shard has no CA certificate (security.ca)", "--ca FILE"),
        ("", "the server at {} asks for a shard's certificate", "shard-N.crt and shard-N.key"),
        ("stranger", "refused the certificate {folder}/stranger.crt", "has signed for shards"),
    ],
)
def test_a_shard_of_the_server_is_told_the_same(world: dict[str, Any], token: str | None, words: str, fix: str) -> None:
    with grpc_server(world["good"], world["ca"]) as address:
        mistake = diagnose(address, security_of(world["folder"], token), "shard")
    assert mistake is not None
    assert words.format(address, folder=world["folder"]) in mistake.message
    assert fix in mistake.fix


@pytest.mark.parametrize(("is_mutual", "worker"), [(False, ""), (False, "worker"), (True, "worker")])
def test_what_is_right_connects(world: dict[str, Any], is_mutual: bool, worker: str) -> None:
    with grpc_server(world["good"], world["ca"] if is_mutual else None) as address:
        client = Channel(address, security_of(world["folder"], worker))
        client.connect(timeout_s=20)
        client.close()


@pytest.mark.parametrize("worker", [None, "worker"])
def test_a_server_that_is_not_there_is_no_mistake(world: dict[str, Any], worker: str | None) -> None:
    """Nor one that accepts connections and says nothing: it may be starting, or frozen."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        for listens in (False, True):
            if listens:
                silent.listen()
            client = Channel(f"127.0.0.1:{port}", security_of(world["folder"], worker))
            with pytest.raises(Lost):
                client.connect(timeout_s=0.3)
            client.close()


def test_worker_takes_renewed_files_when_it_reconnects(world: dict[str, Any], tmp_path: Path) -> None:
    """Its certificate is not the CA's; both of its files are replaced; the next attempt uses them."""
    write(tmp_path, "worker", issue(make_ca("old", 1), "worker", 1))
    (tmp_path / "ca.crt").write_bytes(world["ca"])
    with grpc_server(world["good"], world["ca"]) as address:
        client = Channel(address, secured(tmp_path, "worker", None))
        for name in ("worker.crt", "worker.key"):
            (tmp_path / name).write_bytes((world["folder"] / name).read_bytes())
        with pytest.raises(Lost, match="the certificates were renewed"):
            client.connect(timeout_s=20)
        client.connect(timeout_s=20)
        client.close()


# ---- what is refused before it connects ---------------------------------------------------------------


def config_of(**sections: Any) -> Config:
    return Config.model_validate(sections)


@pytest.mark.parametrize(
    ("server", "has_ca", "insecure", "is_refused"),
    [
        ("10.0.0.5:50051", False, False, True),
        ("gpu-box:50051", False, False, True),
        ("10.0.0.5:50051", False, True, False),
        ("10.0.0.5:50051", True, False, False),
        ("127.0.0.1:50051", False, False, False),
    ],
)
def test_token_is_not_sent_in_the_clear_to_others(
    world: dict[str, Any], monkeypatch: pytest.MonkeyPatch, server: str, has_ca: bool, insecure: bool, is_refused: bool
) -> None:
    monkeypatch.setenv("PS_TOKEN", "a-token")
    security = {"ca": f"{world['folder']}/ca.crt"} if has_ca else {}
    config = config_of(worker={"server": server}, server={"insecure": insecure}, security=security)
    if is_refused:
        with pytest.raises(AuthError, match=f"the token would be sent to {server} unencrypted"):
            worker_credentials(config)
    else:
        assert worker_credentials(config).token == "a-token"


def test_workers_certificate_without_a_ca_is_a_mistake(world: dict[str, Any]) -> None:
    folder = world["folder"]
    with pytest.raises(AuthError, match=r"security\.cert is set without security.ca"):
        worker_credentials(config_of(security={"cert": f"{folder}/worker.crt", "key": f"{folder}/worker.key"}))
