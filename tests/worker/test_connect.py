"""An address that does not answer at all, as of a host that is gone: attempts end, and so does whoever makes them."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Iterator, Sequence

import pytest

from paramserver.common.config.schema import WorkerConfig
from paramserver.common.errors import UnreachableError
from paramserver.common.security import PLAINTEXT
from paramserver.worker.conversation import heartbeat
from paramserver.worker.conversation.client import OPTIONS, Client
from paramserver.worker.conversation.exchange import Exchange
from paramserver.worker.conversation.security import open_channel, wait_until_ready


class Failed(Exception):
    """An attempt has."""


@pytest.fixture
def silent() -> Iterator[str]:
    """A port whose queue of connections is full: what more comes is dropped without a word (Linux)."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listening.getsockname())
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("options", [OPTIONS, heartbeat.OPTIONS], ids=["exchange", "heartbeat"])
def test_an_attempt_to_connect_is_given_up_and_made_again(silent: str, options: Sequence[tuple[str, int]]) -> None:
    """gRPC's own limit is 20 s: a heart that is silent for so long has lost its lease."""

    def fail() -> None:
        raise Failed

    channel = open_channel(silent, PLAINTEXT, options)
    with pytest.raises(Failed):
        wait_until_ready(channel, 6.0, fail)
    channel.close()


def test_a_worker_gives_up_in_time(silent: str) -> None:
    began = time.monotonic()
    with pytest.raises(UnreachableError, match="no server at"):
        Exchange(WorkerConfig(server=silent, give_up_s=1.0), rank=0)
    assert time.monotonic() - began < 8


def test_a_signal_ends_an_attempt_at_once(silent: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    client = Client(silent)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            client.open(20.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    client.close()
    assert time.monotonic() - began < 5
