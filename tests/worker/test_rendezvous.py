"""The rendezvous store of peers: open to those who know the secret of their generation, and to nobody else."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from paramserver.tests.strangers import num_keys, silent
from paramserver.worker.strategies.collectives import store as stores
from paramserver.worker.strategies.collectives.store import Kind, Refused, Store, StoreServer, connect

GARBAGE = [b"[]", b"{}", b'{"op": "get", "keys": [], "timeout_s": 0}', b"[" * 1000, b'"\\ud800"']
SECRET, NAME = b"s" * 32, "run/1/7"


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1")
    server.admit(NAME, SECRET)
    yield server
    server.close()


def client(server: StoreServer, secret: bytes = SECRET, name: str = NAME, timeout_s: float = 5.0) -> Store:
    return Store(lambda: (server.address, secret), name, 1, timeout_s)


def num_unproven(server: StoreServer) -> int:
    return sum(not is_proven for is_proven in list(server._connections.values()))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_it_is_a_store_of_torchs(server: StoreServer) -> None:
    mine, theirs = client(server), client(server)
    mine.set("a", bytes(range(256)))
    mine.set("text", "naïve")
    assert theirs.get("a") == bytes(range(256)) and theirs.get("text").decode() == "naïve"
    assert [mine.add("count", 2), theirs.add("count", 3)] == [2, 5]
    assert theirs.check(["a", "text"]) and not theirs.check(["a", "other"])
    assert mine.num_keys() == 3 and mine.delete_key("a") and not mine.delete_key("a")
    with pytest.raises(dist.DistStoreError, match=r"'?other'? did not come in 0\.01 s"):
        theirs.wait(["other"], timedelta(seconds=0.01))
    with ThreadPoolExecutor() as threads:
        waits = threads.submit(theirs.get, "late")
        mine.set("late", b"1")
        assert waits.result(timeout=10) == b"1"


def test_a_process_without_the_secret_is_told_nothing_and_changes_nothing(server: StoreServer) -> None:
    mine = client(server)
    mine.set("a", b"1")
    assert num_keys(server.address) == 0
    with pytest.raises(Refused, match="does not know the secret"):
        client(server, secret=b"t" * 32, timeout_s=1.0)
    with pytest.raises(OSError):
        client(server, name="run/1/8", timeout_s=0.2)  # nobody was admitted to it
    assert mine.num_keys() == 1 and mine.get("a") == b"1"


def test_a_server_without_the_secret_is_told_nothing() -> None:
    """A stranger at the address of a peer that is gone."""
    other = StoreServer("127.0.0.1")
    other.admit(NAME, b"t" * 32)
    with pytest.raises(Refused, match="does not know the secret"):
        client(other, timeout_s=1.0)
    other.close()


def test_generations_have_keys_of_their_own(server: StoreServer) -> None:
    server.admit("run/1/8", b"u" * 32)
    older, newer = client(server), client(server, b"u" * 32, "run/1/8")
    older.set("a", b"1")
    assert not newer.check(["a"])


def test_a_member_may_hear_of_a_generation_before_its_lowest_does(server: StoreServer) -> None:
    with ThreadPoolExecutor() as threads:
        comes = threads.submit(client, server, b"u" * 32, "run/1/8", 20.0)
        until(lambda: num_unproven(server) > 0)
        server.admit("run/1/8", b"u" * 32)
        comes.result(timeout=20).set("a", b"1")


def test_silent_connections_keep_nobody_out_and_are_bounded(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_MAX_UNPROVEN", 50)
    before = len(os.listdir("/dev/fd"))
    with silent([server.address], each=200):
        client(server).set("a", b"1")
        until(lambda: num_unproven(server) <= 50)
        connection = connect(lambda: (server.address, SECRET), Kind.PEER, 3, NAME, 5)
        rank, here = server.peers.get(timeout=10)
        connection.sendall(b"x")
        assert (rank, here.recv(1)) == (3, b"x")
        connection.close()
        here.close()
    until(lambda: len(os.listdir("/dev/fd")) <= before + 2)  # the client's, on both sides


def test_silent_connections_are_closed_in_time(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_HANDSHAKE_S", 0.05)
    with socket.create_connection(server.address, 5) as connection:
        connection.settimeout(10)
        assert connection.recv(1) == b""


def test_garbage_ends_no_server(server: StoreServer) -> None:
    """Also of a process that knows the secret."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for number in range(200):
        if number % 2:
            item = socket.create_connection(server.address, 5)
        else:
            item = connect(lambda: (server.address, SECRET), Kind.STORE, 1, NAME, 5)
        with item:
            payload = chance.randbytes(chance.randrange(200))
            length = chance.choice([len(payload), 2**32 - 1, 0, 5])
            if number % 4 == 0:
                payload = chance.choice(GARBAGE)
                length = len(payload)
            item.sendall(length.to_bytes(4, "big") + payload)
    client(server).set("a", b"1")
