"""What ps-serve reads a live run from: a server with TLS, a token or both, one that comes later, and other services."""

from __future__ import annotations

import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramserver.tests.certificates import certs, flags
from paramserver.tests.cluster import Cluster
from paramserver.tests.ports import free_port
from paramserver.tests.serve.test_api import Client, ask

pytest.importorskip("starlette", reason="pip install 'paramserver[serve]'")

TASK = ("--task", f"{Path(__file__).with_name('layered.py')}:Counted", "--set", "task.args.size=50000")
RUN = ("--mode", "sync", "--steps", "1000000", "--optimizer", "sgd", "--lr", "1")
SLOW = ("--set", "slowdown.base_s=0.005")  # the cores are for ps-serve too
ROW = {"inputs": [{"name": "input", "shape": [1, 1], "datatype": "FP32", "data": [0]}]}


def weights_of(client: Client) -> tuple[int, list[float]]:
    """The version of a reply, and the least and the greatest weight of each layer."""
    status, reply, _ = client.ask("/v2/models/live/infer", ROW)
    assert status == 200, reply
    return int(reply["model_version"].removeprefix("1.")), reply["outputs"][0]["data"][1:]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, and certificates for the server and any worker; only read."""
    folder = tmp_path_factory.mktemp("lab")
    certs("init", folder)
    return folder


@pytest.fixture(scope="module")
def secured(shared_cluster: Cluster, lab: Path) -> Cluster:
    """A run whose server wants a certificate and the token."""
    shared_cluster.server(*RUN, "--workers", "1", "--set", "security.mutual=true", *flags(lab, "server"))
    shared_cluster.worker(0, *TASK, *SLOW, *flags(lab, "worker"))
    return shared_cluster


def test_tls_and_token_are_those_of_the_run(secured: Cluster, lab: Path) -> None:
    """To the server, and to clients."""
    token, trusted = (lab / "token").read_text().strip(), ssl.create_default_context(cafile=str(lab / "ca.crt"))
    where = ("--server", secured.address, *TASK, *flags(lab, "serve"))
    process = secured.fork("serve", "-m", "paramserver.serve", "--listen", "0.0.0.0:0", *where)
    url = process.event("serve")["url"].rstrip("/").replace("0.0.0.0", "127.0.0.1")
    assert url.startswith("https://")
    process.event("serving")
    for wrong in ("", "another"):
        status, reply, _ = ask(url, "/v2/models/live/infer", ROW, wrong, trusted)
        assert (status, reply["error"]["type"]) == (401, "authentication_error"), reply
    status, reply, _ = ask(url, "/v2/models/live/infer", ROW, token, trusted)
    assert status == 200 and len(set(reply["outputs"][0]["data"][1:])) == 1


@pytest.mark.parametrize(
    ("leaves_out", "code", "message"),
    [
        (("--ca", "--cert", "--key", "--token-file"), 11, "TLS"),
        (("--token-file",), 11, "token"),
        (("--cert", "--key"), 11, "certificate"),
    ],
    ids=["plain", "no token", "no certificate"],
)
def test_what_the_server_refuses_is_a_sentence(
    secured: Cluster, lab: Path, leaves_out: tuple[str, ...], code: int, message: str
) -> None:
    words = flags(lab, "worker")
    given = [word for pair in zip(words[::2], words[1::2], strict=True) if pair[0] not in leaves_out for word in pair]
    done = secured.command("serve", "--listen", "127.0.0.1:0", "--server", secured.address, *TASK, *given)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert message in done.stderr and "fix: " in done.stderr, done.stderr


@pytest.fixture
def web_server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{other.server_address[1]}"
        other.shutdown()


def test_an_address_of_another_service_is_a_sentence(cluster: Cluster, web_server: str) -> None:
    done = cluster.command("serve", "--listen", "127.0.0.1:0", "--server", web_server, *TASK)
    assert done.returncode == 15 and web_server in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_weights_of_another_model_are_a_sentence(cluster: Cluster) -> None:
    cluster.server(*RUN, "--workers", "1")
    cluster.worker(0, *TASK, *SLOW)
    done = cluster.command("serve", "--listen", "127.0.0.1:0", "--server", cluster.address, "--task", "digits")
    assert done.returncode == 2 and "different model" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_server_that_is_not_there_yet_is_waited_for(cluster: Cluster) -> None:
    another, address = (f"127.0.0.1:{free_port()}" for _ in range(2))
    where = ("--server", f"{another},{address}")  # tried in turn
    process = cluster.fork("serve", "-m", "paramserver.serve", "--listen", "127.0.0.1:0", *where, *TASK)
    assert process.event("waiting_for_server")["address"] == where[1]
    cluster.server(*RUN, "--workers", "1", "--listen", address)
    cluster.worker(0, *TASK, *SLOW)
    version, weights = weights_of(Client(process))
    assert weights == [version] * 8
