"""Many requests at once: each gets the tokens that it gets alone and without a cache, of the version that it names."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paramserver.serve.engine import End, Refused, Sampling
from paramserver.serve.slots import Version
from paramserver.tests.serve.conftest import Served, randomize, until
from paramserver.worker.tasks.gpt import Gpt

Serve = Callable[..., Served]
MARGIN = 1e-4  # of the logits of the two likeliest tokens; below it, the order of additions decides


def greedy(task: Gpt, version: int, tokens: list[int], number: int) -> list[int]:
    """The next tokens of a text by a forward pass of the whole text for each, up to a tie."""
    model, found = randomize(task.model(), version), list(tokens)
    with torch.no_grad():
        for _ in range(number):
            logits = model(torch.tensor([found]))[0, -1]
            best, second = logits.topk(2).values.tolist()
            if best - second <= MARGIN:
                break
            found.append(int(logits.argmax()))
    return found[len(tokens) :]


def check(task: Gpt, version: int, prompt: str, tokens: list[int]) -> int:
    """Check that the tokens of a reply are `greedy`. Return the number of those compared."""
    expected = greedy(task, version, list(prompt.encode()), len(tokens))
    assert tokens[: len(expected)] == expected
    return len(expected)


class WithoutCache:
    """The same task, whose model is given the whole text for each token."""

    def __init__(self, task: Gpt) -> None:
        self.model, self.encode, self.decode, self.context = task.model, task.encode, task.decode, task.context


def test_a_batch_with_a_cache_writes_what_each_writes_alone_without_one(serve: Serve, task: Gpt) -> None:
    served, draw = serve(), random.Random(1)
    lengths = [*(draw.randint(1, 40) for _ in range(49)), 300]  # the last one is longer than a chunk
    prompts = ["".join(draw.choice("abc def\n") for _ in range(length)) for length in lengths]
    replies = [served.ask(prompt) for prompt in prompts]
    num_compared = 0
    for prompt, reply in zip(prompts, replies, strict=True):
        end = reply.end()
        assert isinstance(end, End) and (end.reason, end.num_tokens) == ("length", 12)
        num_compared += check(task, 1, prompt, reply.tokens)
    assert num_compared > 500


def test_a_model_without_a_cache_is_served_too(serve: Serve, task: Gpt) -> None:
    served = serve(WithoutCache(task))
    reply = served.ask("def ")
    assert isinstance(reply.end(), End)
    check(task, 1, "def ", reply.tokens)


def test_other_requests_of_a_batch_change_no_draw(serve: Serve) -> None:
    served, sampling = serve(), Sampling(seed=7)
    alone = served.ask("def ", sampling=sampling)
    alone.end()
    together = [served.ask(f"{index} = ", sampling=Sampling(seed=index)) for index in range(5)]
    beside = served.ask("def ", sampling=sampling)
    for reply in (*together, beside):
        reply.end()
    assert beside.tokens == alone.tokens


def test_a_stop_string_ends_a_reply(serve: Serve) -> None:
    served = serve()
    whole = served.ask("def ", 30)
    end = whole.end()
    assert isinstance(end, End)
    text = "".join(whole.texts) + end.text
    stopped = served.ask("def ", 30, stop=(text[8:11],))
    end = stopped.end()
    assert isinstance(end, End) and end.reason == "stop"
    assert "".join(stopped.texts) + end.text == text[: text.index(text[8:11])]


def test_a_cancelled_request_makes_way_for_the_next(serve: Serve) -> None:
    served = serve(slots=1)
    gone = served.ask("def ", 300, pauses=True)
    waits = served.ask("class ")
    served.engine.cancel(gone.job)
    end = gone.end()
    assert isinstance(end, End) and (end.reason, end.num_tokens) == ("cancelled", 1)
    assert isinstance(waits.end(), End)
    until(lambda: served.engine.num_active == 0, "idle engine")


@pytest.mark.parametrize("size", [0, 1])
def test_a_full_queue_refuses(serve: Serve, size: int) -> None:
    """A queue of 0 still serves those for whom there is a slot."""
    served = serve(slots=1, queue=size)
    replies = [served.ask("def ", pauses=True), *(served.ask("def ") for _ in range(size))]
    with pytest.raises(Refused, match=f"{size} requests wait already") as refused:
        served.ask("def ")
    assert refused.value.status == 429
    assert all(isinstance(reply.end(), End) for reply in replies)


def test_pinned_replies_finish_on_their_version(serve: Serve, task: Gpt) -> None:
    served = serve()
    old = served.ask("def ", 30, pauses=True)  # it ends last
    served.publish()
    new = served.ask("def ")
    end, other = old.end(), new.end()
    assert isinstance(end, End) and isinstance(other, End)
    for reply, found, version in ((old, end, 1), (new, other, 2)):
        assert (found.version.number, found.num_swaps) == (version, 0)
        check(task, version, "def ", reply.tokens)
    served.publish()  # the version that drained has made way, without another request
    until(lambda: served.numbers() == [3, 2], "third version")


@pytest.mark.parametrize("options", [{"swap": "recompute"}, {"drain_s": 0.0}])
def test_a_recomputed_reply_goes_on_as_the_new_version_would(serve: Serve, task: Gpt, options: dict[str, Any]) -> None:
    served = serve(**options)
    if "drain_s" in options:  # a third version waits no longer for a reply of the first
        served.publish()
        until(lambda: served.numbers() == [2, 1], "second version")
    reply = served.ask("def ", pauses=True, version="run:1.1")
    served.publish()
    end = reply.end()
    assert isinstance(end, End) and (end.version.number, end.num_swaps) == (2, 1)
    expected = greedy(task, 2, [*b"def ", reply.tokens[0]], 11)
    assert reply.tokens[1 : 1 + len(expected)] == expected
    assert reply.tokens[:1] == greedy(task, 1, list(b"def "), 1)


def test_a_reply_in_flight_keeps_its_keys_and_values(serve: Serve, task: Gpt) -> None:
    served = serve(swap="in-flight")
    reply = served.ask("def ", pauses=True)
    served.publish()
    end = reply.end()
    assert isinstance(end, End) and (end.version.number, end.num_swaps) == (2, 1)
    assert reply.tokens[1:] != greedy(task, 2, [*b"def ", reply.tokens[0]], 11)  # keys and values are of version 1


def test_a_version_is_served_by_name_while_it_is_there(serve: Serve) -> None:
    served = serve()
    old = served.ask("def ", pauses=True)
    served.publish()
    named = served.ask("def ", version="run:1.1")
    old.end(), named.end()
    assert named.tokens == old.tokens
    assert isinstance(served.ask("def ", version="run:1.1").end(), End)  # it stays until the next one
    served.publish()
    until(lambda: served.numbers() == [3, 2], "third version")
    with pytest.raises(Refused, match=r"no version is called run:1.1; there are: run@1.\d, run@1.\d") as refused:
        served.ask("def ", version="run:1.1")
    assert refused.value.status == 404


def test_a_number_names_the_one_version_that_has_it(serve: Serve, task: Gpt) -> None:
    """After the server went back, two versions may have it. Then the reply would be of one that nobody named."""
    served = serve(slots=1)
    first, open_reply = served.ask("def ", version="run:1"), served.ask("def ", 30, pauses=True)
    waits = served.ask("def ", version="run:1")
    served.publish(Version("run", 2, 1), seed=2)
    with pytest.raises(Refused, match=r"2 versions are called run:1; there are: run@1.1, run@2.1") as refused:
        served.ask("def ", version="run:1")
    assert (refused.value.status, refused.value.param) == (404, "model")
    assert isinstance(first.end(), End) and isinstance(open_reply.end(), End) and isinstance(waits.end(), End)
    assert waits.tokens == first.tokens
    for incarnation in (1, 2):
        reply = served.ask("def ", version=f"run:{incarnation}.1")
        reply.end()
        check(task, incarnation, "def ", reply.tokens)


def test_a_request_that_fails_takes_no_other_with_it(serve: Serve) -> None:
    served = serve()
    paused = served.ask("def ", pauses=True)
    wrong = served.ask("\N{LATIN SMALL LETTER E WITH ACUTE}", 4)
    bad = served.ask("a", 4)
    bad.job.tokens[0] = 999  # no token of the model; a prompt of one token is decoded with the others
    assert isinstance(paused.end(), End) and isinstance(wrong.end(), End)
    refused = bad.end()
    assert isinstance(refused, Refused) and (refused.status, refused.code) == (500, "model_failed")
    nan = served.ask("def ", sampling=Sampling(seed=1), pauses=True)
    torch.nn.init.constant_(next(served.engine.models[nan.job.slot].parameters()), torch.nan)
    assert isinstance(nan.end(), Refused)


def test_a_version_that_diverged_leaves_nothing_to_later_requests(serve: Serve, task: Gpt) -> None:
    """Its keys and values are NaN; the row of its request is then shorter than another row of the batch."""
    served = serve(slots=2)
    first = served.ask("a" * 60, pauses=True)
    model = served.engine.models[first.job.slot]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    refused = first.end()
    assert isinstance(refused, Refused) and "logits are not finite" in refused.message
    cancelled = served.ask("b" * 300, pauses=False)  # its prompt has two chunks
    assert isinstance(cancelled.end(), Refused)
    model.load_state_dict(weights)
    replies = {prompt: served.ask(prompt, 30) for prompt in ("def ", "class " * 20)}
    for prompt, reply in replies.items():
        assert isinstance(reply.end(), End)
        check(task, 1, prompt, reply.tokens)


def test_an_engine_that_stops_refuses_all(serve: Serve) -> None:
    served = serve(slots=1)
    active = served.ask("def ", 300, pauses=True)
    waits = served.ask("class ")
    stopping = threading.Thread(target=served.engine.close)
    stopping.start()
    until(lambda: served.engine._is_stopped, "stop")
    ends = [active.end(), waits.end()]
    stopping.join()
    assert [end.status for end in ends if isinstance(end, Refused)] == [503, 503]
