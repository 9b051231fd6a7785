"""A server that may be at several addresses, HOST:PORT[,HOST:PORT]: they are tried in turn."""

from __future__ import annotations

import pytest

from paramserver.common.config.addresses import reached_list
from paramserver.tests.cluster import Cluster
from paramserver.tests.ports import free_port

RUN = ("--mode", "sync", "--workers", "1", "--checkpoint-dir", "snapshots", "--checkpoint-every", "5")


def test_a_worker_goes_on_with_a_server_that_is_started_again_at_another_address(cluster: Cluster) -> None:
    first, second = (f"127.0.0.1:{free_port()}" for _ in range(2))
    server = cluster.server(*RUN, "--steps", "1000000", "--listen", second)
    cluster.address = f"{first},{second}"
    worker = cluster.worker(0, "--task", "xor")
    server.until(lambda: len(server.events("snapshot")) > 2, "snapshots")
    server.kill()
    resumed = cluster.server(*RUN, "--steps", "1000000", "--listen", first, "--resume", "snapshots")
    resumed.until(lambda: len(resumed.events("snapshot")) > 2, "snapshots of the second server")
    assert worker.popen.poll() is None
    assert not resumed.events("released")  # heartbeats go to the new address too


@pytest.mark.parametrize(
    ("given", "read"), [("a:1", "a:1"), ("a:1, [::1]:2", "a:1,[::1]:2"), ("a:1,", None), ("a:1,b", None), ("a:0", None)]
)
def test_lists_are_checked(given: str, read: str | None) -> None:
    if read is None:
        with pytest.raises(ValueError, match=r"HOST:PORT|port 0"):
            reached_list(given)
    else:
        assert reached_list(given) == read
