"""Many clients of one ps-serve over HTTP: each gets its own numbers, and its own mistakes are its own refusals."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from paramserver.tests.cluster import DEADLINE_S
from paramserver.tests.serve.http_service import HttpService
from paramserver.worker.tasks.gpt import Gpt

INFER = "/v2/models/live/infer"


class Rows(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        if a.max() >= 10_000:
            raise ValueError("too many")
        return a - b


class Mixed(Rows):
    """Outputs whose first axis is the batch, and others: a matrix of similarities, columns, a mean."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        found = {"rows": super().forward(a, b), "similar": a @ a.T, "columns": a.T}
        return found | {"mean": a.mean(0), "scalar": a.sum()}


class Task:
    def __init__(self, model: type[nn.Module], has_independent_rows: bool = False) -> None:
        self.model, self.has_independent_rows = model, has_independent_rows


def tensor(name: str, values: list[float]) -> dict[str, Any]:
    return {"name": name, "shape": [len(values), 1], "datatype": "FP32", "data": values}


def inputs(number: int) -> list[dict[str, Any]]:
    """Of client `number`: unequal batches, either order, and some that the model refuses."""
    data = [number * 10.0 + row for row in range(number % 4 + 1)]
    a = tensor("a", [1e5, *data[1:]] if number % 5 == 0 else data)
    b = tensor("b", data[:1] if number % 3 == 0 else data)
    return [b, a] if number % 2 else [a, b]


@pytest.fixture
def started() -> Iterator[list[HttpService]]:
    services: list[HttpService] = []
    yield services
    for service in services:
        service.close()


@pytest.mark.parametrize("task", [Task(Mixed), Task(Rows, has_independent_rows=True)], ids=["mixed", "independent"])
def test_clients_together_get_what_each_gets_alone(started: list[HttpService], task: Task) -> None:
    started.append(service := HttpService(task))
    numbers = range(40)
    alone = [service.ask(INFER, {"inputs": inputs(number)}) for number in numbers]
    assert {status for status, _ in alone} == {200, 400}
    with ThreadPoolExecutor(8) as clients:
        together = list(clients.map(lambda number: service.ask(INFER, {"inputs": inputs(number)}), numbers))
    assert together == alone


def test_inputs_are_bound_by_name(started: list[HttpService]) -> None:
    started.append(service := HttpService(Task(Rows)))
    a, b = tensor("a", [1.0]), tensor("b", [10.0])
    for order in ([a, b], [b, a]):
        assert service.ask(INFER, {"inputs": order})[1]["outputs"][0]["data"] == [-9.0]
    status, reply = service.ask(INFER, {"inputs": [a, {**b, "name": "c"}]})
    assert status == 400 and "no input c; its inputs are: a, b" in reply["error"]["message"]
    assert service.ask(INFER, {"inputs": [a, a]})[0] == 400


class Endless:
    """A task whose model computes until `may_end`."""

    def __init__(self) -> None:
        self.may_end = may_end = threading.Event()

        class Waiting(nn.Module):
            def forward(self, rows: torch.Tensor) -> torch.Tensor:
                assert may_end.wait(DEADLINE_S)
                return rows

        self.model = Waiting


def test_a_reply_that_does_not_come_is_said_and_the_limit_is_a_setting(started: list[HttpService]) -> None:
    task = Endless()
    started.append(service := HttpService(task, reply_s=0.2))
    status, reply = service.ask(INFER, {"inputs": [tensor("rows", [1.0])]})
    task.may_end.set()
    assert status == 504 and "nothing came for 0.2 s (serve.reply_s)" in reply["error"]["message"]


# ---- mistakes ------------------------------------------------------------------------------------

ANY = st.recursive(
    st.none() | st.booleans() | st.text(max_size=3) | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True) | st.sampled_from([2**40, -1, 0, 1e-300, 5e-324, 1e300, "live", "../../etc", "FP32"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
TEXT_FIELDS = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed",
    "stop", "logprobs", "top_logprobs", "stream_options", "n", "best_of", "echo", "logit_bias", "response_format",
)  # fmt: skip
TENSOR_FIELDS = ("name", "shape", "datatype", "data")


def changed(fields: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(fields), ANY, min_size=1, max_size=2)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpService]:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_bytes(bytes(range(256)) * 20)
    service = HttpService(Gpt(text=str(file), context=32, num_layers=1, num_heads=2, width=16))
    yield service
    service.close()


@pytest.fixture(scope="module")
def tensors() -> Iterator[HttpService]:
    service = HttpService(Task(Rows))
    yield service
    service.close()


def is_a_sentence(answer: tuple[int, Any]) -> None:
    status, reply = answer
    assert status < 500, reply
    if status >= 400:
        assert set(reply["error"]) == {"message", "type", "param", "code"} and reply["error"]["message"]


FUZZED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@FUZZED
@given(fields=changed(TEXT_FIELDS), is_chat=st.booleans())
def test_no_field_of_a_text_request_is_an_error_of_the_server(
    text: HttpService, fields: dict[str, Any], is_chat: bool
) -> None:
    whole = {"prompt": "ab", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}
    is_a_sentence(text.ask("/v1/chat/completions" if is_chat else "/v1/completions", whole | fields))


@FUZZED
@given(fields=changed(TENSOR_FIELDS))
def test_no_field_of_a_tensor_is_an_error_of_the_server(tensors: HttpService, fields: dict[str, Any]) -> None:
    is_a_sentence(tensors.ask(INFER, {"inputs": [tensor("a", [1.0]) | fields, tensor("b", [2.0])]}))
    is_a_sentence(tensors.ask(INFER, fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"datatype": ["FP32"]},
        {"shape": [2**40, 2**40]},
        {"shape": [-1]},
        {"shape": [1] * 70},
        {"data": [1e39]},
        {"data": [1.5], "datatype": "INT32"},
        {"data": [300], "datatype": "UINT8"},
        {"data": [[1], [2, 3]]},
        {"data": {}},
        {"name": "\ud800"},
    ],
)
def test_a_tensor_that_is_none_is_refused(tensors: HttpService, fields: dict[str, Any]) -> None:
    status, reply = tensors.ask(INFER, {"inputs": [tensor("a", [1.0]) | fields, tensor("b", [2.0])]})
    assert status == 400 and reply["error"]["message"]


@pytest.mark.parametrize("body", [b'{"inputs": [{"data": [NaN]}]}', b"[" * 100_000, b"1e999", b'"\\ud800"', b"\xff"])
def test_a_body_that_is_no_json_is_refused(text: HttpService, tensors: HttpService, body: bytes) -> None:
    for service, path in ((text, "/v1/completions"), (text, "/v1/chat/completions"), (tensors, INFER)):
        assert service.ask(path, body)[0] == 400


@pytest.mark.parametrize("fields", [{"temperature": 1e-300}, {"top_p": 1e-300}, {"temperature": 5e-324, "top_p": 0}])
def test_the_least_numbers_choose_the_likeliest_token(text: HttpService, fields: dict[str, Any]) -> None:
    request = {"prompt": "ab", "max_tokens": 8, "seed": 1}
    status, reply = text.ask("/v1/completions", request | fields)
    greedy = text.ask("/v1/completions", request | {"temperature": 0})[1]
    assert status == 200 and reply["choices"][0]["text"] == greedy["choices"][0]["text"]


def test_a_chat_that_the_task_refuses_is_the_client_s_mistake(started: list[HttpService], text: HttpService) -> None:
    task = text.served.engine.task
    refusing = type("Refusing", (), {name: getattr(task, name) for name in ("encode", "decode", "context")})()
    refusing.model, refusing.cache_shape = task.model, task.cache_shape
    refusing.chat = lambda messages: {}["role"]
    started.append(service := HttpService(refusing))
    status, reply = service.ask("/v1/chat/completions", {"messages": [{"role": "x", "content": "a"}]})
    assert (status, reply["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("path", ["/v2/models/..%2f..%2fetc/infer", "/v2/models/%ff", "/v2/models/x%00", "/%2e%2e/x"])
def test_a_path_is_no_model(tensors: HttpService, path: str) -> None:
    for body in (None, {}):
        status, reply = tensors.ask(path, body)
        assert status in (404, 405) and reply["error"]["message"]


def test_json_has_no_infinity(started: list[HttpService], text: HttpService) -> None:
    """Logits of -inf are those of tokens that are never drawn."""
    task = text.served.engine.task

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Embedding(256, 256)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.inner(tokens).index_fill(-1, torch.arange(5, 256), -torch.inf)

    masked = type("MaskedTask", (), {})()
    masked.model, masked.encode, masked.decode, masked.context = Masked, task.encode, task.decode, 64
    started.append(service := HttpService(masked))
    for path, fields in (("/v1/completions", {"logprobs": 20}), ("/v1/chat/completions", {"top_logprobs": 20})):
        body = {"prompt": "a", "messages": [{"role": "user", "content": ""}], "max_tokens": 3, "logprobs": True}
        status, reply = service.ask(path, body | fields)
        assert status == 200, reply
        found = reply["choices"][0]["logprobs"]
        assert "null" not in json.dumps(found)
