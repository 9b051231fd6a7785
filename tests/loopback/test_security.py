"""TLS, token and identity between the real programs, call by call."""

from __future__ import annotations

import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paramserver.common.security import Credentials
from paramserver.common.wire.protocol import SERVICE
from paramserver.launch.certs.kit import issue
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.proto import parameter_server_pb2_grpc as pb_grpc
from paramserver.ps.shards.attend import LINES, Register
from paramserver.tests.cluster import end_well
from paramserver.worker.conversation.channel import open_channel

from ..certificates import certs, flags, load, secured, write

TASK = ("--task", "xor", "--set", "task.args={num_samples: 1000}")


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
    """Certificates of two ranks, of any worker and of three shards, of one CA; only read."""
    folder = tmp_path_factory.mktemp("lab")
    certs("init", folder, "--workers", "2", "--shards", "3")
    write(folder, "worker", issue(load(folder), "worker", 1))
    return folder


@pytest.fixture(scope="module")
def mutual(shared_cluster: Any, lab: Path) -> str:
    """Address of a server that asks for certificate and token."""
    shared_cluster.server("--mode", "async", "--workers", "2", *flags(lab, "server"), "--set", "security.mutual=true")
    return shared_cluster.address


@pytest.mark.slow
def test_run_goes_on_while_certificates_are_renewed_and_shows_no_secret(cluster: Any, tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    certs("init", lab)
    token = (lab / "token").read_text().strip()
    cluster.forks = False  # their command lines are looked at
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
    outputs = [server.output, worker.output, renewal.stdout, renewal.stderr, printed.stdout, printed.stderr]
    assert "security.token_file" in printed.stdout
    assert not any(token in text or "PRIVATE" in text for text in [*outputs, *command_lines])


def test_worker_with_the_wrong_token_ends_at_once(shared_cluster: Any, mutual: str, lab: Path) -> None:
    worker = shared_cluster.worker(0, *TASK, *flags(lab, "rank-0")[:-2], PS_TOKEN="guessed-token")
    assert worker.wait() == 11
    assert "the call's token is not the server's" in worker.output
    assert "fix: give the worker the server's token" in worker.output
    assert "guessed-token" not in worker.output + shared_cluster.processes[0].output


def test_members_that_average_among_themselves_say_that_tls_is_not_theirs(cluster: Any, tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    certs("init", lab)
    server = cluster.server("--mode", "allreduce", "--workers", "1", "--steps", "5", *flags(lab, "server"))
    worker = cluster.worker(0, *TASK, *flags(lab, "worker"))
    assert (worker.wait(), server.wait()) == (0, 0), worker.output
    assert "Gloo has no TLS" in worker.event("group_in_plaintext")["meaning"]


def test_worker_that_speaks_no_tls_ends_at_once(shared_cluster: Any, mutual: str) -> None:
    worker = shared_cluster.worker(0, *TASK)
    assert worker.wait() == 11
    assert f"the server at {mutual} speaks TLS" in worker.output
    assert "fix: add --ca FILE" in worker.output
    assert worker.events("waiting_for_server") == []
    assert "Handshake failed" not in worker.output  # gRPC's own words


# ---- the token, call by call ------------------------------------------------------------------------


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
        assert status.settings.mode == "async"
        assert status_of(channel, "/no.Such/Method", "unary_unary", shown).code() is grpc.StatusCode.UNIMPLEMENTED
    with open_channel(mutual, secured(lab, "worker", None), ()) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_nothing_of_a_payload_is_read_without_the_token(mutual: str, lab: Path) -> None:
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


def refused(address: str, security: Credentials, call: str, message: Any) -> str:
    """Why a stream of one message is denied."""
    with open_channel(address, security, ()) as channel:
        begin = getattr(pb_grpc.ParameterServerStub(channel), call)
        with pytest.raises(grpc.RpcError) as error:
            next(begin(iter([message]), timeout=10, metadata=security.metadata))
    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
    return str(error.value.details())


def joining(rank: int) -> pb.WorkerMessage:
    return pb.WorkerMessage(join=pb.Join(rank=rank))


def test_certificate_names_the_rank(mutual: str, lab: Path, tmp_path: Path) -> None:
    """rank-1 is rank 1 also when it asks for none; worker is any; another name is nobody."""
    token = (lab / "token").read_text().strip()

    for name, rank in (("rank-1", -1), ("rank-1", 1), ("worker", 1)):
        security = secured(lab, name, token)
        with open_channel(mutual, security, ()) as channel:
            call = pb_grpc.ParameterServerStub(channel).Exchange
            assert next(call(iter([joining(rank)]), timeout=10, metadata=security.metadata)).welcome.rank == 1
    found = refused(mutual, secured(lab, "rank-1", token), "Exchange", joining(0))
    assert found == "the certificate is for rank 1, and the worker asks to be rank 0"
    write(tmp_path, "somebody", issue(load(lab), "rank-1x", 1))
    (tmp_path / "ca.crt").write_bytes((lab / "ca.crt").read_bytes())
    assert "'rank-1x' may not join" in refused(mutual, secured(tmp_path, "somebody", token), "Exchange", joining(-1))


@pytest.mark.slow
def test_a_run_of_shards_is_for_their_certificates_only(cluster: Any, lab: Path) -> None:
    """A rank's certificate, another shard's, and a rank asked for with a shard's are refused; the run ends well."""
    mutual = ("--set", "security.mutual=true")
    settings = ("--mode", "async", "--workers", "1", "--steps", "5", "--shards", "2", *mutual)
    server = cluster.server(*settings, "--save", "w.safetensors", *flags(lab, "shard-0"))
    register = pb.ShardReport(message=LINES.write(Register(shard=1, shards=2, address="127.0.0.1:9")))
    token = (lab / "token").read_text().strip()
    for name in ("rank-0", "shard-2"):
        found = refused(cluster.address, secured(lab, name, token), "Attend", register)
        assert found == f"the certificate is '{name}', and the process asks to be shard 1"
    found = refused(cluster.address, secured(lab, "shard-1", token), "Exchange", joining(-1))
    assert "'shard-1' may not join" in found
    shard = cluster.shard(1, 2, *mutual, *flags(lab, "shard-1"))
    end_well(cluster.worker(0, "--task", "xor", *flags(lab, "rank-0")), server, shard)
    assert (cluster.folder / "w.safetensors").exists()  # with the part of shard 1
