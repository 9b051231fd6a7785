"""Measures ps-serve: tokens a second, swaps of versions under load, and what a follower costs the training.

Each part runs the real programs over loopback, and clients that read streams in threads of this process:

- `speed`: one client with a cache and without, then several clients at once, in turns.
- `swaps`: clients without a pause while versions change, beside the same training without a change of version.
- `training`: exchanges of a large model with a follower that nobody asks, and without, in turns.
- `equal`: greedy tokens with a cache, in a batch, alone, and of 2 and 4 stages, beside those without a cache. Where the
  two likeliest tokens are closer than `_MARGIN`, the order of additions decides, so the rest is not compared.
"""

from __future__ import annotations

import http.client
import json
import queue
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...common.config.schema import LogConfig
from ...common.errors import ParamServerError
from ...common.reporting.log import setup_logging
from ..output.report import Report, median, percentile
from ..output.tables import number_table, page
from ..rig.server_process import ServerProcess, running, running_server
from ..rig.worker_run import joined_worker

PARTS = ("speed", "swaps", "training", "equal")
_TASKS = Path(__file__).parents[1] / "rig" / "served.py"
_START_S = 120.0
_MARGIN = 1e-4  # of log probabilities
_PROMPT = "def f():"
_STEPS = ("--steps", str(10**9))


@dataclass(frozen=True)
class ServingOptions:
    parts: tuple[str, ...]
    tokens: int
    clients: int
    swaps: int
    mb: int
    seconds: float
    prompts: int
    runs: int

    @property
    def sizes(self) -> dict[str, Any]:
        """Of the task gpt."""
        return {"context": self.tokens + 64, "max_bytes": 100 * (self.tokens + 64)}


def measure_serving(options: ServingOptions) -> Report:
    """Measure the chosen parts."""
    measures = {"speed": _speed, "swaps": _swaps, "training": _training, "equal": _equal}
    results = {part: measures[part](options) for part in options.parts}
    rows = [[f"{part}: {name}", f"{value:,.4g}"] for part, found in results.items() for name, value in found.items()]
    title = f"gpt, replies of {options.tokens} tokens, {options.clients} clients; {options.runs} turns, medians"
    return Report("serve", vars(options), results, page(title, number_table(["", ""], rows)))


# ---- clients --------------------------------------------------------------------------------------


@contextmanager
def _serving(*flags: str) -> Iterator[tuple[str, ServerProcess]]:
    """The address of a ps-serve that has weights, and its process."""
    with running("paramserver.serve", "--listen", "127.0.0.1:0", *flags) as process:
        address = process.wait_for("serve", _START_S)["url"].removeprefix("http://").rstrip("/")
        process.wait_for("serving", _START_S)
        yield address, process


def _sets(sizes: dict[str, Any]) -> list[str]:
    return [word for name, size in sizes.items() for word in ("--set", f"task.args.{name}={size}")]


def _read_stream(address: str, tokens: int) -> tuple[list[float], set[str]]:
    """Request a text. Returns the times of its tokens and its versions. ParamServerError for a reply that was cut."""
    connection = http.client.HTTPConnection(address, timeout=600)
    body = {"prompt": _PROMPT, "max_tokens": tokens, "stream": True, "logprobs": 1}  # so each token is a chunk
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    reply = connection.getresponse()
    times, versions, reason = [], set(), ""
    while line := reply.readline():
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        if "error" in chunk or reply.status != 200:
            break
        versions.add(chunk["system_fingerprint"])
        reason = chunk["choices"][0]["finish_reason"] or reason
        times.append(time.perf_counter())
    connection.close()
    if reason != "length" or len(times) != tokens + 1:
        raise ParamServerError(f"a reply was cut after {len(times)} chunks: status {reply.status}")
    return times[:-1], versions


class _Clients:
    """Threads that request texts without a pause, or once."""

    def __init__(self, address: str, count: int, tokens: int) -> None:
        self._address, self._tokens = address, tokens
        self.gaps: queue.SimpleQueue[list[float]] = queue.SimpleQueue()  # seconds between tokens, of a reply
        self.first_s: list[float] = []
        self.num_failed = self.num_mixed = 0
        self.is_over = False
        self.threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]

    def __enter__(self) -> _Clients:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over = True
        for thread in self.threads:
            thread.join()

    def _run(self) -> None:
        while True:
            began = time.perf_counter()
            try:
                times, versions = _read_stream(self._address, self._tokens)
            except (OSError, http.client.HTTPException, ParamServerError):
                self.num_failed += 1
            else:
                self.num_mixed += len(versions) > 1
                self.first_s.append(times[0] - began)
                self.gaps.put([after - before for before, after in pairwise(times)])
            if self.is_over:
                return

    def all_gaps(self) -> list[float]:
        return [gap for _ in range(self.gaps.qsize()) for gap in self.gaps.get()]


def _rate(address: str, count: int, tokens: int) -> float:
    """Returns tokens a second of so many clients with one request each."""
    began = time.perf_counter()
    clients = _Clients(address, count, tokens)
    clients.is_over = True  # after one request
    with clients:
        pass
    if clients.num_failed:
        raise ParamServerError(f"{clients.num_failed} of {count} requests failed")
    return count * tokens / (time.perf_counter() - began)


# ---- parts ----------------------------------------------------------------------------------------


def _speed(options: ServingOptions) -> dict[str, float]:
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="ps-bench-") as folder:
        file = f"{folder}/w.safetensors"
        save_file(_random_model(options).state_dict(), file)
        sizes = _sets(options.sizes)
        with (
            _serving(file, "--task", "gpt", *sizes) as (cached, _),
            _serving(file, "--task", f"{_TASKS}:WithoutCache", *sizes) as (plain, _),
        ):
            contestants = {"single": (cached, 1), "several": (cached, options.clients), "plain": (plain, 1)}
            found: dict[str, list[float]] = {name: [] for name in contestants}
            for address in (cached, plain):
                _rate(address, 1, 16)
            for _ in range(options.runs):
                for name, (address, count) in contestants.items():
                    found[name].append(_rate(address, count, options.tokens))
    single, several, plain_rate = (median(found[name]) for name in contestants)
    return {
        "tokens/s": single,
        "tokens/s without a cache": plain_rate,
        "with / without": single / plain_rate,
        f"tokens/s of {options.clients} clients": several,
        "several / single": several / single,
    }


def _swaps(options: ServingOptions) -> dict[str, float]:
    task = ["--task", "gpt", *_sets(options.sizes)]
    slow = ["--set", "slowdown.base_s=0.2", "--batch-size", "1"]
    with (
        running_server("--mode", "async", "--workers", "1", *_STEPS, *task) as server,
        running("paramserver.worker", "--rank", "0", "--server", server.address, *task, *slow),
    ):
        server.wait_for("training_started", _START_S)
        found = {name: _under_load(options, server.address, task, name) for name in ("without", "with")}
    result = {f"p99 gap {name}, ms": percentile(gaps, 0.99) * 1e3 for name, (gaps, _) in found.items()}
    result |= {f"median gap {name}, ms": median(gaps) * 1e3 for name, (gaps, _) in found.items()}
    ratio = result["p99 gap with, ms"] / result["p99 gap without, ms"]
    return {**found["with"][1], **result, "p99 with / without": ratio}


def _under_load(
    options: ServingOptions, address: str, task: list[str], name: str
) -> tuple[list[float], dict[str, float]]:
    """Returns the gaps between tokens of all replies, and what became of the replies."""
    every = "1" if name == "with" else str(10**9)
    with _serving("--server", address, "--every", every, *task) as (served, process):
        _rate(served, 1, 16)

        def num_swaps() -> int:
            return sum(event.get("event") == "serving" for event in process.events) - 1

        with _Clients(served, options.clients, options.tokens // 4) as clients:
            began = time.monotonic()
            while num_swaps() < options.swaps if name == "with" else time.monotonic() < began + options.seconds:
                time.sleep(0.05)
    gaps, num_replies = clients.all_gaps(), len(clients.first_s)
    counts = {"swaps": num_swaps(), "replies": num_replies, "failed or cut": clients.num_failed}
    return gaps, {**counts, "of several versions": clients.num_mixed}


def _training(options: ServingOptions) -> dict[str, float]:
    num_floats = options.mb * 250_000
    follower = ("--task", f"{_TASKS}:Synthetic", "--set", f"task.args.num_floats={num_floats}", "--every", "10s")
    found: dict[str, list[float]] = {"without": [], "with": []}
    with (
        running_server("--mode", "async", "--workers", "1", *_STEPS) as server,
        joined_worker(server.address, 0, num_floats, "sgd") as worker,
    ):

        def rate() -> float:
            began, count = time.perf_counter(), 0
            while time.perf_counter() < began + options.seconds:
                worker.optimizer.step()
                count += 1
            return count / (time.perf_counter() - began)

        worker.optimizer.step()
        for _ in range(options.runs):
            found["without"].append(rate())
            with _beside(server.address, follower, worker):
                found["with"].append(rate())
    rates = {f"exchanges/s {name}": median(values) for name, values in found.items()}
    return rates | {"slower by": 1 - rates["exchanges/s with"] / rates["exchanges/s without"]}


@contextmanager
def _beside(address: str, flags: tuple[str, ...], worker: Any) -> Iterator[None]:
    """A follower that has fetched its first version. The worker goes on meanwhile, since nobody else commits."""
    with running("paramserver.serve", "--listen", "127.0.0.1:0", "--server", address, *flags) as process:
        while not any(event.get("event") == "serving" for event in process.events):
            worker.optimizer.step()
        yield


def _equal(options: ServingOptions) -> dict[str, float]:
    from ...common.config.schema import ServeConfig
    from ...serve.engine import Engine, Piece, Request, Sampling
    from ...serve.models import language_model
    from ...serve.slots import NUM_SLOTS, Version
    from ...serve.stages import Spec, Stages
    from ...serve.task import TaskSpec
    from ...worker.tasks.gpt import Gpt
    from ..rig.served import WithoutCache

    setup_logging(LogConfig(level="error"), "ps-bench")
    draw, length = random.Random(1), min(64, options.tokens)
    prompts = [bytes(draw.choices(b"abcdef ():\n", k=draw.randint(1, 300))) for _ in range(options.prompts)]
    sampling = Sampling(temperature=0, num_logprobs=2)

    def in_stages(size: int) -> list[list[Any]]:
        spec = Spec(TaskSpec("gpt", sizes), size, "auto", options.clients)
        stages = Stages(spec.task.load(), spec, lambda error: None)
        for name, tensor in _random_model(options).state_dict().items():
            stages.models[0].write(name, tensor)
        stages.start()
        found = replies(spec.task.load(), options.clients, stages)
        stages.close()
        return found

    def replies(task: Any, slots: int, stages: Stages | None = None) -> list[list[Any]]:
        """The chosen tokens of each reply."""
        models: list[Any] = [_random_model(options) for _ in range(NUM_SLOTS)] if stages is None else stages.models
        kind = language_model(task, models[0]) if stages is None else stages.kind
        engine = Engine(task, models, kind, ServeConfig(slots=slots, queue=len(prompts)), stages)
        slot = engine.begin_arrival()
        assert slot is not None
        engine.arrived(slot, Version("run", 1, 1))
        found: list[list[Any]] = [[] for _ in prompts]
        left = threading.Semaphore(0)

        def emit_to(chosen: list[Any]) -> Any:
            return lambda piece: chosen.append(piece.chosen) if isinstance(piece, Piece) else left.release()

        for prompt, chosen in zip(prompts, found, strict=True):
            engine.submit(Request(tuple(prompt), length, sampling), emit_to(chosen))
        engine.start()
        for _ in prompts:
            left.acquire()
        engine.close()
        return found

    sizes: dict[str, Any] = {"context": 300 + length, "max_bytes": 100 * (300 + length)}
    plain, alone, batched = (
        replies(WithoutCache(**sizes), 1), replies(Gpt(**sizes), 1), replies(Gpt(**sizes), options.clients)
    )  # fmt: skip
    ends = [_num_decided(reply) for reply in plain]
    result = {"prompts": len(prompts), "tokens compared": sum(ends)}
    others = {"alone": alone, "in a batch": batched, **{f"in {size} stages": in_stages(size) for size in (2, 4)}}
    for name, other in others.items():
        pairs = [
            [[item.token for item in reply[:end]] for reply in both]
            for *both, end in zip(plain, other, ends, strict=True)
        ]
        result[f"replies that differ {name}"] = sum(theirs != ours for theirs, ours in pairs)
    return {name: float(value) for name, value in result.items()}


def _num_decided(reply: list[Any]) -> int:
    """Returns how many tokens come before one that is a tie."""
    ties = (at for at, item in enumerate(reply) if item.likeliest[0][1] - item.likeliest[1][1] <= _MARGIN)
    return next(ties, len(reply))


def _random_model(options: ServingOptions) -> Any:
    """A new model's logits are all equal, so its weights are drawn."""
    import torch

    from ...worker.tasks.gpt import Gpt

    model, generator = Gpt(**options.sizes).model(), torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model
