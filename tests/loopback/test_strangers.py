"""Workers that average among themselves, in a TLS job on one machine: what a stranger finds at their ports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from ..certificates import certs, flags
from ..strangers import listens, num_keys, on_other_addresses, silent

TASK = ("--task", "xor", "--set", "task.args={num_samples: 1000}", "--set", "slowdown.base_s=0.01")


def test_strangers_find_no_key_and_delay_nobody(cluster: Any, tmp_path: Path) -> None:
    """They come before the second worker does, and stay."""
    lab = tmp_path / "lab"
    certs("init", lab)
    server = cluster.server("--mode", "allreduce", "--workers", "2", "--steps", "100000", *flags(lab, "server"))
    workers = [cluster.worker(0, *TASK, *flags(lab, "worker"))]
    server.event("admitted")
    first = workers[0].popen.pid
    workers[0].until(lambda: bool(listens([first])), "its store")
    with silent(listens([first])):
        workers.append(cluster.worker(1, *TASK, *flags(lab, "worker")))
        for item in workers:
            item.event("group")
        found = listens([worker.popen.pid for worker in [server, *workers]])
        assert on_other_addresses(found) == []
        at_workers = listens([worker.popen.pid for worker in workers])
        assert at_workers
        assert {address: num_keys(address) for address in at_workers} == dict.fromkeys(at_workers, 0)
    assert not any(worker.events("group_broken") for worker in workers)


def test_a_caller_of_an_older_protocol_is_refused_in_a_sentence(cluster: Any) -> None:
    cluster.server("--mode", "sync")
    with grpc.insecure_channel(cluster.address) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/paramserver.v1.ParameterServer/Status")(b"", timeout=30)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "the caller speaks version 1, and this ps-server" in refused.value.details()
