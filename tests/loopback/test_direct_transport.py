"""The direct transport between the real programs: every contribution once, in the clear and in TLS, with shards, when
its connection is cut and the stream is not; and over gRPC where it cannot be had."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paramserver.common.security import PLAINTEXT
from paramserver.tests.cluster import at_gates, end_well
from paramserver.worker.conversation.stream_client import DirectConnection, DirectError

from ..certificates import certs, flags
from ..faults.proxy import Proxy

STEPS = 12
PADDING = 700_000  # 2.8 MB: two windows, and time to be read while it is made
DIRECT = ("--set", "server.shared_memory=false")


def environment(lab: Path, name: str) -> dict[str, str]:
    words = flags(lab, name)
    settings = dict(zip(words[::2], words[1::2], strict=True))
    return {f"PS_SECURITY__{flag[2:].replace('-', '_').upper()}": value for flag, value in settings.items()}


def check(cluster: Any, server: Any, workers: list[Any], share: float = 1.0) -> list[str]:
    end_well(*workers, server)
    weights = load_file(cluster.folder / "w.safetensors")
    num = len(workers)
    assert torch.equal(-weights["seen"].view(-1, STEPS)[:num], torch.full((num, STEPS), share))
    assert weights["padding"].unique().tolist() == [-share * num * STEPS]
    transports = [worker.event("tensors")["transport"] for worker in workers]
    assert [row["transport"] for row in cluster.summary()["workers"]] == transports
    return transports


def serve(cluster: Any, mode: str, num_workers: int, *more: str) -> Any:
    return cluster.server(
        "--mode", mode, "--workers", str(num_workers), "--steps", str(STEPS), "--save", "w.safetensors",
        "--summary", "s.json", "--set", "policy.weighting=equal", *DIRECT, *more,
    )  # fmt: skip


@pytest.mark.slow
def test_in_tls_with_certificates_of_both(cluster: Any, tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    certs("init", lab, "--workers", "2")
    server = serve(cluster, "sync", 2, *flags(lab, "server"), "--set", "security.mutual=true")
    workers = [
        cluster.script(rank, "onehot.py", str(STEPS), PADDING=str(PADDING), **environment(lab, f"rank-{rank}"))
        for rank in range(2)
    ]
    assert check(cluster, server, workers, share=0.5) == ["direct", "direct"]


@pytest.mark.slow
def test_a_server_of_which_one_port_is_published(cluster: Any) -> None:
    """As in a container, behind a proxy or a NAT: over gRPC, and everybody says why."""
    server = serve(cluster, "async", 1)
    port = server.event("listening")["direct_port"]
    with Proxy(cluster.address, host="127.0.0.2") as proxy:
        worker = cluster.script(0, "onehot.py", str(STEPS), PADDING=str(PADDING), PS_SERVER=proxy.address)
        assert check(cluster, server, [worker]) == ["grpc"]
    why = f"direct: port {port} (server.direct_port): connection refused"
    assert why in worker.event("tensors")["reason"]
    assert why in server.event("admitted")["reason"]
    assert why in cluster.summary()["workers"][0]["transport_reason"]


@pytest.mark.parametrize("cut", [pytest.param("stream", marks=pytest.mark.slow), "direct"])
def test_a_proxy_that_cuts_one_of_the_two(cluster: Any, cut: str) -> None:
    """The other goes with it, on both sides; the heartbeat heartbeats, so the worker is still a member, and goes on."""
    server = serve(cluster, "async", 1)
    port = server.event("listening")["direct_port"]
    gate = cluster.folder / "gate"
    with Proxy(cluster.address, direct_port=port) as proxy:
        script = ("onehot.py", str(STEPS), str(gate), "5")
        worker = cluster.script(0, *script, PADDING=str(PADDING), PS_SERVER=proxy.address)
        at_gates(worker)
        ways = [item for item in proxy.connections if (item.port == port) == (cut == "direct")]
        assert len(ways) == 1 or cut == "stream"
        ways[0].reset()
        server.event("away")
        gate.touch()
        assert check(cluster, server, [worker]) == ["direct"]
    assert [event["resumed"] for event in server.events("joined")] == [False, True]


def test_why_there_is_none_is_a_phrase() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port, began = other.getsockname()[1], time.monotonic()
        with pytest.raises(DirectError, match=rf"port {port} \(server.direct_port\): no reply"):
            DirectConnection("127.0.0.1:1", port, bytes(32), PLAINTEXT)
        assert time.monotonic() - began < 5  # after one second
    with pytest.raises(DirectError, match=rf"port {port} \(server.direct_port\): connection refused"):
        DirectConnection("127.0.0.1:1", port, bytes(32), PLAINTEXT)
