"""`ps-serve` as a process: OpenAI's API by its own client, errors by their fields, and a live run that is followed."""

from __future__ import annotations

import http.client
import json
import math
import re
import socket
import ssl
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from paramserver.serve.source import LiveRun
from paramserver.tests.cluster import Cluster, Process
from paramserver.tests.serve.conftest import randomize
from paramserver.worker.conversation.messages import StatusReply
from paramserver.worker.tasks.digits import Digits
from paramserver.worker.tasks.gpt import Gpt

pytest.importorskip("starlette", reason="pip install 'paramserver[serve]'")

SIZES = {"num_layers": 1, "num_heads": 2, "width": 16, "context": 2000, "max_bytes": 60_000}
FLAGS = [word for name, size in SIZES.items() for word in ("--set", f"task.args.{name}={size}")]


def ask(
    url: str, path: str, body: Any = None, token: str = "", tls: ssl.SSLContext | None = None
) -> tuple[int, Any, dict[str, str]]:
    """The status, JSON (read strictly) and headers of a reply."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url + path, data, headers), timeout=60, context=tls
        ) as reply:
            return reply.status, json.loads(reply.read(), parse_constant=pytest.fail), dict(reply.headers)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read(), parse_constant=pytest.fail), dict(error.headers)


class Client:
    """Asks one ps-serve."""

    def __init__(self, process: Process) -> None:
        self.url = process.event("serve")["url"].rstrip("/")
        self.process = process
        process.event("serving")  # a version has arrived

    def ask(self, path: str, body: Any = None) -> tuple[int, Any, dict[str, str]]:
        return ask(self.url, path, body)

    def openai(self) -> Any:
        openai = pytest.importorskip("openai", reason="pip install 'openai>=2'")
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=60)


def serve(cluster: Cluster, *flags: str) -> Client:
    name = f"serve{len(cluster.processes)}"
    return Client(cluster.fork(name, "-m", "paramserver.serve", "--listen", "127.0.0.1:0", *flags))


def weights_of(path: Path, model: Any) -> str:
    save_file(randomize(model, 1).state_dict(), path)
    return str(path)


@pytest.fixture(scope="module")
def gpt(shared_cluster: Cluster) -> Client:
    file = weights_of(shared_cluster.folder / "w.safetensors", Gpt(**SIZES).model())
    return serve(shared_cluster, file, "--task", "gpt", *FLAGS)


def test_the_official_client_reads_both_endpoints(gpt: Client) -> None:
    client, options = gpt.openai(), {"model": "live", "max_tokens": 8, "temperature": 0, "seed": 1}
    assert {model.id for model in client.models.list()} == {"live", "gpt", "w@0.0"}
    whole = client.completions.create(prompt="def ", logprobs=2, **options)
    assert whole.system_fingerprint == "w:0.0" and whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (4, 8, 12)
    assert len(whole.choices[0].logprobs.tokens) == 8
    chunks = list(
        client.completions.create(prompt="def ", stream=True, stream_options={"include_usage": True}, **options)
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == 8 and {chunk.system_fingerprint for chunk in chunks} == {"w:0.0"}
    messages = [{"role": "user", "content": "def"}]
    chat = client.chat.completions.create(messages=messages, **options)
    stream = client.chat.completions.create(messages=messages, stream=True, **options)
    text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    assert text == chat.choices[0].message.content and chat.choices[0].message.role == "assistant"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"tools": [{}]}, "tools"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"max_tokens": 1025}, "max_tokens"),
        ({"prompt": "a" * 2000}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"stop": [""]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [97, 256]}, "prompt"),
        ({"seed": 1.5}, "seed"),
        ({"top_p": 7}, "top_p"),
        ({"logprobs": True}, "logprobs"),
        ({"stream_options": 3}, "stream_options"),
    ],
)
def test_a_field_that_cannot_be_followed_is_named(gpt: Client, fields: dict[str, Any], param: str) -> None:
    status, reply, _ = gpt.ask("/v1/completions", {"prompt": "a", "max_tokens": 4} | fields)
    assert (status, reply["error"]["param"]) == (400, param)
    assert param in reply["error"]["message"] and reply["error"]["type"] == "invalid_request_error"


def test_other_mistakes_have_the_same_shape(gpt: Client) -> None:
    for path, body, status in (
        ("/v1/completions", {"model": "w@7", "prompt": "a"}, 404),
        ("/v1/completions", {"model": "other", "prompt": "a"}, 404),
        ("/v1/completions", b"[]", 400),
        ("/v1/completions", b'{"seed": ' + b"9" * 5000 + b"}", 400),
        ("/v1/completions", {"prompt": "\ud800"}, 400),
        ("/v1/nothing", None, 404),
        ("/v2/models/other/infer", {}, 404),
    ):
        found, reply, _ = gpt.ask(path, body)
        assert (found, set(reply["error"])) == (status, {"message", "type", "param", "code"}), path
    for data, length in ((b"{}", {"content-length": str(1 << 30)}), (iter([bytes(1 << 19)] * 3), {})):
        connection = http.client.HTTPConnection(gpt.url.removeprefix("http://"), timeout=60)
        connection.request("POST", "/v1/completions", data, length, encode_chunked=not length)
        reply = connection.getresponse()
        assert reply.status == 413 and "1048576 bytes" in json.loads(reply.read())["error"]["message"]
        connection.close()
    assert "w@0.0" in gpt.ask("/v1/completions", {"model": "w@7", "prompt": "a"})[1]["error"]["message"]


def test_unknown_fields_are_ignored_and_a_version_is_served_by_name(gpt: Client) -> None:
    body = {"model": "w@0.0", "prompt": "a", "max_tokens": 2, "user": "x", "made_up": 1}
    status, reply, headers = gpt.ask("/v1/completions", body)
    assert (status, reply["system_fingerprint"], headers["ps-version"]) == (200, "w:0.0", "0.0")
    assert gpt.ask("/health")[1]["status"] == "ok" and gpt.ask("/v2/health/ready")[0] == 200


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_frees_its_slot(gpt: Client, is_streamed: bool) -> None:
    def num_tokens() -> float:
        with urllib.request.urlopen(f"{gpt.url}/metrics", timeout=60) as reply:
            return float(re.search(rb"^paramserver_serve_tokens_total (.*)$", reply.read(), re.MULTILINE)[1])

    def num_active() -> int:
        return gpt.ask("/health")[1]["active"]

    before = num_tokens()
    connection = http.client.HTTPConnection(gpt.url.removeprefix("http://"), timeout=60)
    body = {"prompt": "a", "max_tokens": 1024, "temperature": 0, "stream": is_streamed}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    gpt.process.until(lambda: num_active() == 1, "active request")
    connection.close()
    gpt.process.until(lambda: num_active() == 0, "free slot")
    assert num_tokens() - before < 1024


def test_a_model_of_tensors_answers_the_inference_protocol(cluster: Cluster, tmp_path: Path) -> None:
    model = Digits().model()
    client = serve(cluster, weights_of(tmp_path / "d.safetensors", model), "--task", "digits")
    (entry,) = client.ask("/v2/models/digits")[1]["inputs"]
    shape = [2, *entry["shape"][1:]]
    num_values = math.prod(shape)
    tensor = {"name": "input", "shape": shape, "datatype": "FP32", "data": [0.5] * num_values}
    status, reply, _ = client.ask("/v2/models/digits/infer", {"id": "7", "inputs": [tensor]})
    assert (status, reply["id"], reply["model_version"]) == (200, "7", "0.0")
    (output,) = reply["outputs"]
    assert output["shape"] == [2, 10] and output["data"][:10] == output["data"][10:]
    wrong = {**tensor, "data": [0.5]}
    assert client.ask("/v2/models/digits/infer", {"inputs": [wrong]})[1]["error"]["param"] == "input"
    large = {**tensor, "data": [3e38] * num_values}  # sums are beyond float32
    status, reply, _ = client.ask("/v2/models/digits/infer", {"inputs": [large]})
    assert status == 400 and "output has values that are not finite" in reply["error"]["message"]
    assert client.ask("/v1/completions", {"prompt": "a"})[0] == 404


def test_no_weights_or_two_sources_of_them_are_a_sentence(cluster: Cluster) -> None:
    done = cluster.command("serve")
    assert done.returncode == 2 and "no weights to serve" in done.stderr and "Traceback" not in done.stderr
    done = cluster.command("serve", "--run", "last", "x.safetensors", "--task", "gpt")
    assert done.returncode == 2 and "weights come from one place" in done.stderr
    for flags in ((), ("--task", "gpt")):
        done = cluster.command("serve", "x.safetensors", *flags)
        assert done.returncode == 2 and "x.safetensors: cannot be read: there is no such file" in done.stderr
    assert "url" not in done.stdout + done.stderr, "it said that it serves"


@pytest.mark.slow
def test_clients_that_read_nothing_keep_no_slot(cluster: Cluster) -> None:
    """Their replies end in the engine, and are longer than a connection's buffers. The queue refuses most of them."""
    file = weights_of(cluster.folder / "w.safetensors", Gpt(**SIZES).model())
    client = serve(cluster, file, "--task", "gpt", *FLAGS, "--slots", "2", "--set", "serve.queue=2")
    body = json.dumps({"prompt": "a", "max_tokens": 1024, "stream": True, "logprobs": 20}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body)
    host, _, port = client.url.removeprefix("http://").rpartition(":")
    with ExitStack() as stack:
        for _ in range(40):
            silent = stack.enter_context(socket.socket())
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # the server's buffer is 111 kB, not 3 MB
            silent.connect((host, int(port)))
            silent.sendall(request + body)
        client.process.until(lambda: client.ask("/health")[1]["active"] == 2, "replies")
        client.process.until(lambda: client.ask("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200, "reply")
        client.process.until(lambda: client.ask("/health")[1]["active"] == 0, "idle engine")
        metrics = urllib.request.urlopen(f"{client.url}/metrics", timeout=60).read().decode()
    (num_written,) = re.findall(r"^paramserver_serve_tokens_total (.*)$", metrics, re.MULTILINE)
    assert 0 < float(num_written) < 4 * 1024, "the replies of two slots and a queue of two are not read"
    (num_refused,) = re.findall(r'^paramserver_serve_replies_total{status="429"} (.*)$', metrics, re.MULTILINE)
    assert float(num_refused) >= 30, "two slots and a queue of two take four of forty"


def test_another_run_at_the_address_is_not_taken_for_the_first() -> None:
    """Its version has a greater number, and its weights are of the same shape."""
    standings = iter([("ours", 5), ("theirs", 9), ("theirs", 10), ("ours", 6)])

    class Server:
        """Stands in for the connection."""

        address = "127.0.0.1:1"

        def standing(self) -> Any:
            run, version = next(standings)
            return StatusReply(run=run, incarnation=1, version=version)

    source = LiveRun(Server())  # type: ignore[arg-type]
    found = [source.newest() for _ in range(4)]
    assert [version and (version.run, version.number) for version in found] == [("ours", 5), None, None, ("ours", 6)]


@pytest.mark.slow
def test_a_live_run_is_followed_and_outlived(cluster: Cluster) -> None:
    """Each reply names one version over three swaps, and a server that is gone changes none of it."""
    server = cluster.server("--mode", "async", "--workers", "1", "--steps", "100000", "--task", "gpt", *FLAGS)
    cluster.worker(0, "--task", "gpt", *FLAGS)
    client = serve(cluster, "--server", cluster.address, "--every", "1")
    versions: list[int] = []
    while len(set(versions)) < 4:
        stream = client.openai().completions.create(model="live", prompt="a", max_tokens=20, stream=True)
        fingerprints = {chunk.system_fingerprint for chunk in stream}
        assert len(fingerprints) == 1, fingerprints
        versions.append(int(fingerprints.pop().rpartition(":1.")[2]))
    assert versions == sorted(versions)
    server.kill()
    client.process.until(lambda: client.ask("/health")[1]["status"] == "stale", "stale run")
    status, reply, headers = client.ask("/v1/completions", {"prompt": "a", "max_tokens": 4})
    assert status == 200 and int(headers["ps-version"].removeprefix("1.")) >= versions[-1]
    assert reply["system_fingerprint"].endswith(f":{headers['ps-version']}")
