"""An address that does not reply at all, as of a host that is gone: attempts end, and so does whoever makes them. One
where something else replies is refused at once."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import grpc
import pytest

from paramserver.common.config.schema import Config, WorkerConfig
from paramserver.common.errors import UnreachableError
from paramserver.common.wire.protocol import other_protocol
from paramserver.worker.conversation import channel
from paramserver.worker.conversation.channel import HEARTBEAT_OPTIONS, OPTIONS, Channel, Lost
from paramserver.worker.conversation.evaluator import Evaluator
from paramserver.worker.conversation.exchange import Exchange

from .served import serve

AT_ONCE_S = 15.0  # of a worker that would wait for minutes; on a busy machine gRPC takes seconds


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


@pytest.mark.parametrize("options", [OPTIONS, HEARTBEAT_OPTIONS], ids=["exchange", "heartbeat"])
def test_an_attempt_to_connect_is_given_up_and_made_again(
    silent: str, options: Sequence[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC's own limit is 20 s: a heartbeat that is silent for so long has lost its lease."""

    def fail(*_: object) -> None:
        raise Failed

    monkeypatch.setattr(channel, "OPTIONS", options)
    monkeypatch.setattr(channel, "diagnose", fail)
    client = Channel(silent)
    with pytest.raises(Failed):
        client.connect(15.0)
    client.close()


def test_a_worker_gives_up_in_time(silent: str) -> None:
    began = time.monotonic()
    with pytest.raises(UnreachableError, match="no server at"):
        Exchange(WorkerConfig(server=silent, give_up_s=1.0), rank=0)
    assert time.monotonic() - began < 8


def test_a_signal_ends_an_attempt_at_once(silent: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    client = Channel(silent)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            client.connect(20.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    client.close()
    assert time.monotonic() - began < 5


def test_an_attempt_to_connect_leaves_no_thread(silent: str) -> None:
    """A thread that watches a channel prints a traceback when the channel is closed, as at a program's end."""
    client, before = Channel(silent), set(threading.enumerate())
    with pytest.raises(Lost):
        client.connect(0.3)
    assert set(threading.enumerate()) == before
    client.close()


# ---- somebody else's address ------------------------------------------------------------------------


@contextlib.contextmanager
def http_server() -> Iterator[str]:
    class Quiet(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def older_server() -> Iterator[str]:
    """Refuses calls as a ps-server of version 1 of the protocol would refuse this one's."""

    class Older(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            message = other_protocol(details.method.replace("v5", "v1"))
            return grpc.stream_stream_rpc_method_handler(
                lambda _, context: context.abort(grpc.StatusCode.UNIMPLEMENTED, message)
            )

    server, address = serve(Older())
    yield address
    server.stop(None)


def test_a_server_of_another_version_of_the_protocol_is_named() -> None:
    with older_server() as address, pytest.raises(UnreachableError) as mistake:
        Exchange(WorkerConfig(server=address), rank=0)
    assert "the caller speaks version 1, and this ps-server" in mistake.value.message
    assert "one version on all hosts" in mistake.value.fix


@contextlib.contextmanager
def other_grpc_server() -> Iterator[str]:
    server, address = serve()
    yield address
    server.stop(None)


@pytest.mark.parametrize(
    ("somebody", "words"),
    [
        (http_server, "is no ps-server: it says '<!DOCTYPE HTML>"),
        (other_grpc_server, "it does not know paramserver.v5"),
    ],
)
def test_something_else_at_the_address_is_named_at_once(
    somebody: Callable[[], AbstractContextManager[str]], words: str
) -> None:
    began = time.monotonic()
    with somebody() as address, pytest.raises(UnreachableError) as mistake:
        Exchange(WorkerConfig(server=address), rank=0)
    assert words in mistake.value.message
    assert "--server HOST:PORT" in mistake.value.fix
    assert time.monotonic() - began < AT_ONCE_S


def test_what_was_tried_is_said_of_a_name_that_may_come_up_and_of_a_port_where_nobody_is() -> None:
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        for address, cause in [
            ("nobody.invalid:50051", "name"),
            (f"127.0.0.1:{bound.getsockname()[1]}", "connection refused"),
        ]:
            with pytest.raises(UnreachableError, match=rf"no server at {address} .*: .*{cause}"):
                Exchange(WorkerConfig(server=address, give_up_s=0.5), rank=0)


def test_a_evaluator_says_for_which_server_it_waits_and_gives_up_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(UnreachableError, match=f"no server at {address}"):
            Evaluator(Config.model_validate({"worker": {"server": address, "give_up_s": 0.5}}))
    output = "".join(capsys.readouterr())
    assert output.count("waiting_for_server") == 1 and address in output
