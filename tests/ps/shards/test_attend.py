"""Where a shard is reached; the processes are in tests/loopback."""

from __future__ import annotations

import pytest

from paramserver.ps.shards.attend import _reachable


@pytest.mark.parametrize(
    ("address", "peer", "expected"),
    [
        ("10.0.0.7:50052", "ipv4:1.2.3.4:999", "10.0.0.7:50052"),
        ("0.0.0.0:50052", "ipv4:1.2.3.4:999", "1.2.3.4:50052"),
        ("[::]:50052", "ipv6:%5Bfe80::1%5D:999", "[fe80::1]:50052"),
        ("0.0.0.0:50052", "unix:", "127.0.0.1:50052"),
    ],
)
def test_where_workers_find_a_shard_that_listens_everywhere(address: str, peer: str, expected: str) -> None:
    assert _reachable(address, peer) == expected
