"""TLS, token and identity between the real programs, and every mistake in them: exit 11, at once, with a way out."""

from __future__ import annotations

import signal
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paramserver.common.config.schema import Config, SecurityConfig
from paramserver.common.errors import AuthError
from paramserver.common.security import read_pem
from paramserver.common.wire.protocol import SERVICE
from paramserver.launch.authority import Identity, Validity, make_ca, make_server, make_worker
from paramserver.launch.certs import app
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.proto import parameter_server_pb2_grpc as pb_grpc
from paramserver.ps.wire.security import check_security, insecurity
from paramserver.worker.conversation.client import Client, Lost
from paramserver.worker.conversation.security import PLAINTEXT, Security, open_channel, worker_security

TASK = ("--task", "xor", "--set", "task.args={num_samples: 1000}")
AT_ONCE_S = 3.0


def certs(*argv: str | Path) -> None:
    app([str(word) for word in argv], standalone_mode=False)


def flags(folder: Path, name: str) -> tuple[str, ...]:
    return (
        "--ca", f"{folder}/ca.crt", "--cert", f"{folder}/{name}.crt", "--key", f"{folder}/{name}.key",
        "--token-file", f"{folder}/token",
    )  # fmt: skip


def serial(address: str, folder: Path) -> str:
    """Serial number of the certificate that a new connection gets."""
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "worker.crt", folder / "worker.key")
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as plain:
        return context.wrap_socket(plain, server_hostname=host).getpeercert()["serialNumber"]


# ---- real programs --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """rank-0, rank-1 and worker certificates of one CA; only read."""
    folder = tmp_path_factory.mktemp("lab")
    certs("init", folder, "--workers", "2")
    write(folder, "worker", make_worker(load(folder), "worker", Validity.days(1)))
    return folder


@pytest.fixture(scope="module")
def mutual(shared_cluster: Any, lab: Path) -> str:
    """Address of a server that asks for certificate and token."""
    shared_cluster.server("--mode", "async", "--workers", "2", *flags(lab, "server"), "--set", "security.mutual=true")
    return shared_cluster.address


def test_run_goes_on_while_certificates_are_renewed_and_shows_no_secret(cluster: Any, tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    certs("init", lab)
    token = (lab / "token").read_text().strip()
    server = cluster.server(
        "--mode", "async", "--workers", "1", "--steps", "1000000", "--set", "security.mutual=true", "--set",
        "server.shared_memory=false", "--set", "server.status_interval_s=0.1", *flags(lab, "server"),
    )  # fmt: skip
    assert server.event("listening")["security"] == "mutual TLS, token"
    secret = {"PS_TOKEN": token, "PS_LOG__LEVEL": "debug"}
    worker = cluster.worker(0, *TASK, "--set", "slowdown.base_s=0.01", *flags(lab, "worker")[:-2], **secret)
    server.event("training_started")
    command_lines = [Path(f"/proc/{process.popen.pid}/cmdline").read_text() for process in (server, worker)]
    before = serial(cluster.address, lab)
    renewal = cluster.command("launch.certs", "init", str(lab), "--renew")
    assert renewal.returncode == 0, renewal.stderr
    server.until(lambda: serial(cluster.address, lab) != before, "the new certificate")
    step = server.events("status")[-1]["step"]
    server.until(lambda: server.events("status")[-1]["step"] > step, "step after the renewal")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 143
    server.signal(signal.SIGTERM)
    assert server.wait() == 143
    assert worker.events("connection_lost") == []
    printed = cluster.command("ps", "--print-config", *flags(lab, "server"), PS_TOKEN=token)
    said = [server.output, worker.output, renewal.stdout, renewal.stderr, printed.stdout, printed.stderr]
    assert "security.token_file" in printed.stdout
    assert not any(token in text or "PRIVATE" in text for text in [*said, *command_lines])


def test_worker_with_the_wrong_token_ends_at_once(shared_cluster: Any, mutual: str, lab: Path) -> None:
    worker = shared_cluster.worker(0, *TASK, *flags(lab, "rank-0")[:-2], PS_TOKEN="guessed-token")
    assert worker.wait() == 11
    assert "the call's token is not the server's" in worker.output
    assert "fix: give the worker the server's token" in worker.output
    assert "guessed-token" not in worker.output + shared_cluster.processes[0].output


def test_worker_that_speaks_no_tls_ends_at_once(shared_cluster: Any, mutual: str) -> None:
    worker = shared_cluster.worker(0, *TASK)
    assert worker.wait() == 11
    assert f"the server at {mutual} speaks TLS" in worker.output
    assert "fix: add --ca FILE" in worker.output
    assert worker.events("waiting_for_server") == []
    assert "Handshake failed" not in worker.output  # gRPC's own words


# ---- the token, call by call ------------------------------------------------------------------------


def secured(folder: Path, name: str, token: str | None, ca: str = "ca.crt") -> Security:
    config = SecurityConfig(ca=f"{folder}/{ca}", cert=f"{folder}/{name}.crt", key=f"{folder}/{name}.key")
    return Security(config, read_pem(config), token)


CALLS = [
    (f"/{SERVICE}/Exchange", "stream_stream"),
    (f"/{SERVICE}/Heartbeat", "stream_stream"),
    (f"/{SERVICE}/Pull", "unary_stream"),
    (f"/{SERVICE}/Status", "unary_unary"),
    ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "stream_stream"),
    ("/no.Such/Method", "unary_unary"),
]


def status_of(channel: grpc.Channel, method: str, kind: str, metadata: Any = None) -> grpc.RpcError:
    """How the call ends, which must not be well."""
    request = iter([b""]) if kind.startswith("stream") else b""
    with pytest.raises(grpc.RpcError) as refused:
        list(getattr(channel, kind)(method)(request, timeout=10, metadata=metadata))
    return refused.value


@pytest.mark.parametrize(("method", "kind"), CALLS)
@pytest.mark.parametrize("sent", [None, "", "Bearer", "Bearer guessed", "TOKEN", "Basic TOKEN", "Bearer TOKEN0"])
def test_every_call_without_the_token_is_refused(mutual: str, lab: Path, method: str, kind: str, sent: str) -> None:
    token = (lab / "token").read_text().strip()
    metadata = None if sent is None else (("authorization", sent.replace("TOKEN", token)),)
    with open_channel(mutual, secured(lab, "worker", None), ()) as channel:
        error = status_of(channel, method, kind, metadata)
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert dict(error.trailing_metadata())["ps-reason"] == "UNAUTHENTICATED"


def test_with_the_token_calls_are_served_and_health_needs_none(mutual: str, lab: Path) -> None:
    token = (lab / "token").read_text().strip()
    shown = secured(lab, "worker", token).metadata
    with open_channel(mutual, secured(lab, "worker", token), ()) as channel:
        status = pb_grpc.ParameterServerStub(channel).Status(pb.StatusRequest(), timeout=10, metadata=shown)
        assert status.mode == "async"
        assert status_of(channel, "/no.Such/Method", "unary_unary", shown).code() is grpc.StatusCode.UNIMPLEMENTED
    with open_channel(mutual, secured(lab, "worker", None), ()) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_nothing_of_a_body_is_read_without_the_token(mutual: str, lab: Path) -> None:
    """A sender that never ends is stopped by flow control before much has left, and refused."""
    sent = 0

    def without_end() -> Iterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield bytes(1 << 20)

    with open_channel(mutual, secured(lab, "worker", None), ()) as channel, pytest.raises(grpc.RpcError) as refused:
        list(channel.stream_stream(f"/{SERVICE}/Exchange")(without_end(), timeout=20))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert sent < 32


def test_certificate_names_the_rank(mutual: str, lab: Path, tmp_path: Path) -> None:
    """rank-1 is rank 1 also when it asks for none; worker is any; another name is nobody."""
    token = (lab / "token").read_text().strip()

    def join(security: Security, rank: int) -> pb.ServerMessage:
        with open_channel(mutual, security, ()) as channel:
            stub = pb_grpc.ParameterServerStub(channel)
            join = iter([pb.WorkerMessage(join=pb.Join(rank=rank))])
            return next(stub.Exchange(join, timeout=10, metadata=security.metadata))

    assert join(secured(lab, "rank-1", token), -1).welcome.rank == 1
    assert join(secured(lab, "rank-1", token), 1).welcome.rank == 1
    assert join(secured(lab, "worker", token), 1).welcome.rank == 1
    with pytest.raises(grpc.RpcError) as refused:
        join(secured(lab, "rank-1", token), 0)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert refused.value.details() == "the certificate is for rank 1, and the worker asks to be rank 0"
    write(tmp_path, "somebody", make_worker(load(lab), "rank-1x", Validity.days(1)))
    (tmp_path / "ca.crt").write_bytes((lab / "ca.crt").read_bytes())
    with pytest.raises(grpc.RpcError) as refused:
        join(secured(tmp_path, "somebody", token), -1)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "'rank-1x' may not join" in refused.value.details()


# ---- what a worker says of TLS ------------------------------------------------------------------------


def write(folder: Path, name: str, identity: Identity) -> None:
    (folder / f"{name}.crt").write_bytes(identity.certificate_pem)
    (folder / f"{name}.key").write_bytes(identity.key_pem)


def load(folder: Path) -> Identity:
    from paramserver.launch.authority import load_ca

    return load_ca((folder / "ca.crt").read_bytes(), (folder / "ca.key").read_bytes())


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
    ca, other = make_ca("our CA", Validity.days(9)), make_ca("their CA", Validity.days(9))
    write(folder, "ca", ca)
    write(folder, "worker", make_worker(ca, "worker", Validity.days(9)))
    write(folder, "stranger", make_worker(other, "worker", Validity.days(9)))
    here = ["127.0.0.1"]
    return {
        "folder": folder, "ca": ca.certificate_pem,
        "good": make_server(ca, here, Validity.days(9)),
        "expired": make_server(ca, here, Validity(now - 2 * day, now - day)),
        "future": make_server(ca, here, Validity(now + day, now + 2 * day)),
        "foreign": make_server(other, here, Validity.days(9)),
        "elsewhere": make_server(ca, ["gpu.lab", "10.0.0.5"], Validity.days(9)),
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
        client = Client(address, security_of(folder, worker))
        began = time.monotonic()
        with pytest.raises(AuthError) as mistake:
            client.open(timeout_s=20)
        assert time.monotonic() - began < AT_ONCE_S
        client.close()
    assert words.format(address, folder=folder) in mistake.value.message
    assert fix in mistake.value.fix
    assert mistake.value.exit_code == 11


def security_of(folder: Path, worker: str | None) -> Security:
    """None: in the clear; "": with the CA only."""
    if worker is None:
        return PLAINTEXT
    if worker:
        return secured(folder, worker, None)
    config = SecurityConfig(ca=f"{folder}/ca.crt")
    return Security(config, read_pem(config), None)


@pytest.mark.parametrize(("is_mutual", "worker"), [(False, ""), (False, "worker"), (True, "worker")])
def test_what_is_right_connects(world: dict[str, Any], is_mutual: bool, worker: str) -> None:
    with grpc_server(world["good"], world["ca"] if is_mutual else None) as address:
        client = Client(address, security_of(world["folder"], worker))
        client.open(timeout_s=20)
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
            client = Client(f"127.0.0.1:{port}", security_of(world["folder"], worker))
            with pytest.raises(Lost):
                client.open(timeout_s=0.3)
            client.close()


def test_worker_takes_renewed_files_when_it_reconnects(world: dict[str, Any], tmp_path: Path) -> None:
    """Its certificate is not the CA's; both of its files are replaced; the next attempt uses them."""
    write(tmp_path, "worker", make_worker(make_ca("old", Validity.days(1)), "worker", Validity.days(1)))
    (tmp_path / "ca.crt").write_bytes(world["ca"])
    with grpc_server(world["good"], world["ca"]) as address:
        client = Client(address, secured(tmp_path, "worker", None))
        for name in ("worker.crt", "worker.key"):
            (tmp_path / name).write_bytes((world["folder"] / name).read_bytes())
        with pytest.raises(Lost, match="the certificates were renewed"):
            client.open(timeout_s=20)
        client.open(timeout_s=20)
        client.close()


# ---- what is refused before anything starts -----------------------------------------------------------


def config_of(**sections: Any) -> Config:
    return Config.model_validate(sections)


@pytest.mark.parametrize(
    ("listen", "has_tls", "has_token", "words"),
    [
        ("127.0.0.1:0", False, False, None),
        ("[::1]:0", False, False, None),
        ("0.0.0.0:0", True, True, None),
        ("0.0.0.0:0", False, False, "the connection is neither encrypted nor authenticated"),
        ("0.0.0.0:0", False, True, "the connection is not encrypted: no security.cert"),
        ("[::]:0", True, False, "the connection is not authenticated: no token"),
        ("gpu-box:0", False, False, "gpu-box:0 can be reached by other machines"),
    ],
)
def test_open_address_needs_tls_and_token(
    world: dict[str, Any], monkeypatch: pytest.MonkeyPatch, listen: str, has_tls: bool, has_token: bool, words: str
) -> None:
    monkeypatch.setenv("PS_TOKEN", "a-token" if has_token else "")
    folder = world["folder"]
    security = {"cert": f"{folder}/worker.crt", "key": f"{folder}/worker.key"} if has_tls else {}
    if words is None:
        check_security(config_of(server={"listen": listen}, security=security))
        return
    with pytest.raises(AuthError, match=words.replace("(", r"\(")) as refused:
        check_security(config_of(server={"listen": listen}, security=security))
    assert "ps-certs init" in refused.value.fix and "--insecure" in refused.value.fix
    check_security(config_of(server={"listen": listen, "insecure": True}, security=security))


@pytest.mark.parametrize("security", [{"ca": "ca.crt"}, {"ca": "ca.crt", "mutual": True}])
def test_server_without_a_certificate_does_not_pretend(world: dict[str, Any], security: dict[str, Any]) -> None:
    security = security | {"ca": f"{world['folder']}/ca.crt"}
    with pytest.raises(AuthError, match="would not speak TLS"):
        check_security(config_of(security=security))


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
        with pytest.raises(AuthError, match=f"the token would go to {server} in the clear"):
            worker_security(config)
    else:
        assert worker_security(config).token == "a-token"


def test_workers_certificate_without_a_ca_is_a_mistake(world: dict[str, Any]) -> None:
    folder = world["folder"]
    with pytest.raises(AuthError, match="not whom to trust"):
        worker_security(config_of(security={"cert": f"{folder}/worker.crt", "key": f"{folder}/worker.key"}))


@pytest.mark.parametrize(
    ("listen", "token", "words"),
    [("0.0.0.0:0", "", "neither"), ("0.0.0.0:0", "a-token", "not encrypted"), ("127.0.0.1:0", "", None)],
)
def test_insecure_stays_loud(monkeypatch: pytest.MonkeyPatch, listen: str, token: str, words: str | None) -> None:
    monkeypatch.setenv("PS_TOKEN", token)
    meaning = insecurity(config_of(server={"listen": listen, "insecure": True}))
    if words is None:
        assert meaning is None
    else:
        assert words in meaning
        assert "anyone who reaches this port can read and train" in meaning
