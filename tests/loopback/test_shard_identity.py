"""Shards under mutual TLS: each registers as the one its certificate names, and nobody else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from paramserver.common.security import Credentials
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.proto import parameter_server_pb2_grpc as pb_grpc
from paramserver.ps.shards.messages import LINES, Register
from paramserver.worker.conversation.channel import open_channel

from ..certificates import certs, flags, secured

MUTUAL = ("--set", "security.mutual=true")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """rank-0, shard-0, shard-1 and shard-2 certificates of one CA; only read."""
    folder = tmp_path_factory.mktemp("lab")
    certs("init", folder, "--workers", "1", "--shards", "3")
    return folder


def refused(address: str, security: Credentials, call: str, message: Any) -> tuple[grpc.StatusCode, str]:
    """How a stream of one message ends, which must not be well."""
    with open_channel(address, security, ()) as channel, pytest.raises(grpc.RpcError) as error:
        next(
            getattr(pb_grpc.ParameterServerStub(channel), call)(iter([message]), timeout=5, metadata=security.metadata)
        )
    return error.value.code(), error.value.details()


@pytest.mark.slow
def test_a_run_of_shards_is_for_their_certificates_only(cluster: Any, lab: Path) -> None:
    """A rank's certificate, another shard's, and a rank asked for with a shard's are refused; the run ends well."""
    settings = ("--mode", "async", "--workers", "1", "--steps", "5", "--shards", "2", *MUTUAL)
    server = cluster.server(*settings, "--save", "w.safetensors", *flags(lab, "shard-0"))
    register = pb.ShardReport(message=LINES.write(Register(shard=1, shards=2, address="127.0.0.1:9")))
    denied = grpc.StatusCode.PERMISSION_DENIED
    token = (lab / "token").read_text().strip()
    for name, words in [
        ("rank-0", "the certificate is 'rank-0', and the process asks to be shard 1"),
        ("shard-2", "the certificate is 'shard-2', and the process asks to be shard 1"),
    ]:
        assert refused(cluster.address, secured(lab, name, token), "Attend", register) == (denied, words)
    code, words = refused(
        cluster.address, secured(lab, "shard-1", token), "Exchange", pb.WorkerMessage(join=pb.Join(rank=-1))
    )
    assert (code, "'shard-1' may not join" in words) == (denied, True)
    shard = cluster.shard(1, 2, *MUTUAL, *flags(lab, "shard-1"))
    worker = cluster.worker(0, "--task", "xor", *flags(lab, "rank-0"))
    assert [process.wait() for process in (worker, server, shard)] == [0, 0, 0]
    assert (cluster.folder / "w.safetensors").exists()  # with the part of shard 1
