"""The direct transport between the real programs: every contribution once, in the clear and in TLS, with shards, when
its connection is cut and the stream is not; and over gRPC where it cannot be had."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paramserver.common.security import PLAINTEXT
from paramserver.worker.conversation.direct import DirectConnection, DirectError

from ..certificates import certs, flags
from ..faults.proxy import Proxy

STEPS = 12
TRANSPORTS = ("stream", "direct")
PADDING = 700_000  # 2.8 MB: two windows, and time to be read while it is made
DIRECT = ("--set", "server.shared_memory=false")


def environment(lab: Path, name: str) -> dict[str, str]:
    words = flags(lab, name)
    settings = dict(zip(words[::2], words[1::2], strict=True))
    return {f"PS_SECURITY__{flag[2:].replace('-', '_').upper()}": value for flag, value in settings.items()}


def transports(workers: list[Any]) -> list[str]:
    return [worker.event("tensors")["transport"] for worker in workers]


def check(cluster: Any, server: Any, workers: list[Any], share: float = 1.0) -> list[str]:
    assert [worker.wait() for worker in workers] == [0] * len(workers), workers[0].output + server.output
    assert server.wait() == 0, server.output
    weights = load_file(cluster.folder / "w.safetensors")
    num = len(workers)
    assert torch.equal(-weights["seen"].view(-1, STEPS)[:num], torch.full((num, STEPS), share))
    assert weights["padding"].unique().tolist() == [-share * num * STEPS]
    summary = json.loads((cluster.folder / "s.json").read_text())
    assert [row["transport"] for row in summary["workers"]] == transports(workers)
    return transports(workers)


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


def test_a_direct_connection_that_is_cut_is_made_again(cluster: Any) -> None:
    """With the stream it belongs to: the worker joins again and goes on, and nothing counts twice."""
    server = serve(cluster, "async", 1)
    worker = cluster.script(0, "onehot.py", str(STEPS), PADDING=str(PADDING), CUT_EVERY="3")
    assert check(cluster, server, [worker]) == ["direct"]
    assert [event["resumed"] for event in server.events("joined")] == [False, True, True, True]


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
    assert why in json.loads((cluster.folder / "s.json").read_text())["workers"][0]["transport_reason"]


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["stream", "direct"])
def test_a_proxy_that_cuts_one_of_the_two(cluster: Any, cut: str) -> None:
    """The other goes with it, on both sides; the heartbeat heartbeats, so the worker is still a member, and goes on."""
    server = serve(cluster, "async", 1)
    port = server.event("listening")["direct_port"]
    gate = cluster.folder / "gate"
    with Proxy(cluster.address, direct_port=port) as proxy:
        script = ("onehot.py", str(STEPS), str(gate), "5")
        worker = cluster.script(0, *script, PADDING=str(PADDING), PS_SERVER=proxy.address)
        worker.until(lambda: "at the gate" in worker.output, "fifth step")
        ways = {
            name: [connection for connection in proxy.connections if (connection.port == port) == (name == "direct")]
            for name in TRANSPORTS
        }
        assert len(ways["direct"]) == 1 <= len(ways["stream"])
        ways[cut][0].reset()
        server.until(lambda: bool(server.events("away")), "loss of it")
        gate.touch()
        assert check(cluster, server, [worker]) == ["direct"]
    assert [event["resumed"] for event in server.events("joined")] == [False, True]


def test_a_port_that_is_taken(cluster: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = cluster.command(
            "ps", "--listen", "127.0.0.1:0", "--set", "server.direct=true", "--set", f"server.direct_port={port}"
        )
    assert ended.returncode == 10, ended.stderr
    assert f"cannot listen on port {port} for direct connections" in ended.stderr


def test_why_there_is_none_is_a_phrase() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port, began = other.getsockname()[1], time.monotonic()
        with pytest.raises(DirectError, match=rf"port {port} \(server.direct_port\): no reply"):
            DirectConnection("127.0.0.1:1", port, bytes(32), PLAINTEXT)
        assert time.monotonic() - began < 5  # after one second
    with pytest.raises(DirectError, match=rf"port {port} \(server.direct_port\): connection refused"):
        DirectConnection("127.0.0.1:1", port, bytes(32), PLAINTEXT)
