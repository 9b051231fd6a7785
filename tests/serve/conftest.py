"""An engine with a small model of random weights, and replies that a test can stop in the middle."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from paramserver.common.config.schema import ServeConfig
from paramserver.serve.engine import End, Engine, Job, Piece, Refused, Request, Sampling
from paramserver.serve.models import language_model
from paramserver.serve.slots import NUM_SLOTS, Version
from paramserver.tests.cluster import DEADLINE_S
from paramserver.worker.tasks.gpt import Gpt

GREEDY = Sampling(temperature=0)


def randomize(model: nn.Module, seed: int) -> nn.Module:
    """Draw all weights; a new model's logits are zeros."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


class Reply:
    """What the engine emits for a request. With `pauses`, the engine waits after the first piece for `go_on`."""

    def __init__(self, engine: Engine, request: Request, pauses: bool = False) -> None:
        self._found: queue.Queue[Piece | End | Refused] = queue.Queue()
        self._may_go_on, self.has_begun = threading.Event(), threading.Event()
        if not pauses:
            self._may_go_on.set()
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.job: Job = engine.submit(request, self._emit)
        if pauses:
            assert self.has_begun.wait(DEADLINE_S)

    def _emit(self, found: Piece | End | Refused) -> None:
        self._found.put(found)
        self.has_begun.set()
        assert self._may_go_on.wait(DEADLINE_S)

    def go_on(self) -> None:
        self._may_go_on.set()

    def end(self) -> End | Refused:
        self.go_on()
        while isinstance(found := self._found.get(timeout=DEADLINE_S), Piece):
            self.tokens.append(found.chosen.token)
            self.texts.append(found.text)
        return found


class Served:
    """An engine and its versions. `seed`: of the first version's weights."""

    def __init__(self, task: Any, options: ServeConfig, seed: int = 0) -> None:
        self.task = task
        self.engine = self.make_engine(options)
        self._numbers = itertools.count(1)
        self.publish(seed=seed)
        self.engine.start()

    def make_engine(self, options: ServeConfig) -> Engine:
        models = [self.task.model() for _ in range(NUM_SLOTS)]
        return Engine(self.task, models, language_model(self.task, models[0]), options)

    def write(self, slot: int, seed: int) -> None:
        randomize(self.engine.models[slot], seed)

    def publish(self, version: Version | None = None, seed: int = 0) -> None:
        """Let a version arrive, the next one by default. Its weights are drawn by `seed`, or else by its number."""
        version = version or Version("run", 1, next(self._numbers))
        until(lambda: self._arrive(version, seed or version.number), "an idle slot")

    def _arrive(self, version: Version, seed: int) -> bool:
        if (slot := self.engine.begin_arrival()) is None:
            return False
        self.write(slot, seed)
        self.engine.arrived(slot, version)
        return True

    def ask(self, prompt: str, max_tokens: int = 12, pauses: bool = False, **of_request: Any) -> Reply:
        request = Request(tuple(prompt.encode()), max_tokens, **({"sampling": GREEDY} | of_request))
        return Reply(self.engine, request, pauses)

    def numbers(self) -> list[int]:
        return [version.number for version in self.engine.versions()]


def until(condition: Callable[[], bool], description: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"no {description}"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Gpt:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_bytes(bytes(range(256)) * 20)
    return Gpt(text=str(text), context=400, num_layers=2, num_heads=2, width=32)


@pytest.fixture
def serve(task: Gpt) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(task: Any = task, **options: Any) -> Served:
        started.append(Served(task, ServeConfig(**options)))
        return started[-1]

    yield start
    for served in started:
        served.engine.close()
