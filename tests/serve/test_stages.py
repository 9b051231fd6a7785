"""`ps-serve --group G`: the model in several processes writes the same tokens, also when one of them dies."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from paramserver.common.config.schema import ServeConfig
from paramserver.common.errors import UsageError
from paramserver.serve import stages
from paramserver.serve.engine import End, Engine, Refused
from paramserver.serve.slots import NUM_SLOTS
from paramserver.serve.stages import Divided, Spec, Stages
from paramserver.serve.task import TaskSpec
from paramserver.tests.cluster import DEADLINE_S, Cluster
from paramserver.tests.serve import test_sources as sources
from paramserver.tests.serve.conftest import Served, randomize, until
from paramserver.tests.serve.test_api import FLAGS, SIZES, Client, serve, weights_of
from paramserver.worker.tasks.gpt import Gpt

ARGS = {"context": 200, "max_bytes": 20_000, "num_layers": 4, "num_heads": 2, "width": 32}
LAYERED = Path(__file__).with_name("layered.py")


class Group(Served):
    """An engine whose model is in several processes."""

    def __init__(self, name: str, args: dict[str, Any], size: int, **options: Any) -> None:
        self.failures, self._spec, self._size = list[Exception](), TaskSpec(name, args), size
        super().__init__(self._spec.load(), ServeConfig(**{"stage_silence_s": 60.0} | options))
        self.stages.start()

    def make_engine(self, options: ServeConfig) -> Engine:
        spec = Spec(self._spec, self._size, "auto", 8, 1, options.stage_silence_s)
        self.stages = Stages(self.task, spec, self.failures.append)
        return Engine(self.task, self.stages.models, self.stages.kind, options, self.stages)

    def write(self, slot: int, seed: int) -> None:
        for name, tensor in randomize(self.task.model(), seed).state_dict().items():
            self.stages.models[slot].write(name, tensor)

    def process(self, stage: int) -> psutil.Process:
        (found,) = {child for child in psutil.Process().children() if child.cmdline()[-1:] == [str(stage)]}
        return found

    def kill(self, stage: int) -> None:
        """Kill a stage, and return once it has died."""
        process = self.process(stage)
        pid = process.pid
        process.kill()
        until(lambda: not psutil.pid_exists(pid) or process.status() == psutil.STATUS_ZOMBIE, "end of the stage")

    def close(self) -> None:
        self.stages.close()
        self.engine.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []
    gc.collect()  # memory of groups before

    def make(size: int = 2, name: str = "gpt", args: dict[str, Any] = ARGS, **options: Any) -> Group:
        groups.append(Group(name, args, size, **options))
        return groups[-1]

    yield make
    for group in groups:
        group.close()
        assert not group.failures


def mapped_bytes(pid: int) -> int:
    """The bytes of weights in the memory of a process."""
    maps = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd" in line]
    ranges = [[int(end, 16) for end in fields[0].split("-")] for fields in maps]
    return sum(end - begin for begin, end in ranges)


def alone(prompts: list[str], version: int = 1, max_tokens: int = 12) -> list[list[int]]:
    """The tokens of one process."""
    served = Served(Gpt(**ARGS), ServeConfig(), seed=version)
    replies = [served.ask(prompt, max_tokens) for prompt in prompts]
    ends = [reply.end() for reply in replies]
    served.engine.close()
    assert all(isinstance(end, End) for end in ends)
    return [reply.tokens for reply in replies]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_stages_write_what_one_process_writes(start: Callable[..., Group], size: int) -> None:
    group, draw = start(size), random.Random(1)
    prompts = ["".join(draw.choice("abc def\n") for _ in range(draw.randint(1, 60))) for _ in range(20)]
    replies = [group.ask(prompt) for prompt in prompts]
    assert all(isinstance(reply.end(), End) for reply in replies)
    assert [reply.tokens for reply in replies] == alone(prompts)
    divided = group.stages.divided
    processes = [os.getpid(), *(child.pid for child in psutil.Process().children())]
    mapped = [num for num in map(mapped_bytes, processes) if num]
    wanted = [NUM_SLOTS * divided.slot_bytes(stage) for stage in range(size)]
    assert sorted(mapped) == sorted(wanted) and max(wanted) < 0.8 * sum(wanted)


@pytest.mark.slow
def test_a_killed_stage_pauses_replies_and_they_go_on_with_the_same_version(start: Callable[..., Group]) -> None:
    group = start()
    old = group.ask("def ", 30, pauses=True)
    group.publish()
    other = group.ask("class ", 30)
    group.kill(1)
    ends = [old.end(), other.end()]
    assert [(end.version.number, end.num_swaps) for end in ends if isinstance(end, End)] == [(1, 0), (2, 0)]
    assert old.tokens == alone(["def "], 1, 30)[0] and other.tokens == alone(["class "], 2, 30)[0]
    group.kill(1)  # while nobody asks
    again = group.ask("def ", version="run:1.2")
    assert isinstance(again.end(), End) and again.tokens == alone(["def "], 2)[0]


@pytest.mark.slow
def test_a_request_that_kills_a_stage_each_time_ends_with_an_error(start: Callable[..., Group]) -> None:
    group = start(2, f"{LAYERED}:Deadly", {})
    refused = group.ask("\N{LATIN SMALL LETTER E WITH ACUTE}").end()
    assert isinstance(refused, Refused) and (refused.status, refused.code) == (500, "model_failed")
    assert "stage 1 has ended" in refused.message
    assert isinstance(group.ask("abc").end(), End)
    deadly, harmless = (group.engine.infer({"tokens": torch.tensor([[token]])}) for token in (200, 65))
    error = deadly.exception(DEADLINE_S)
    assert isinstance(error, Refused) and error.status == 500 and "stage 1 has ended" in error.message
    assert harmless.result(DEADLINE_S)[0]["output"].shape == (1, 1, 128)


@pytest.mark.slow
def test_a_frozen_stage_is_noticed_and_started_again(start: Callable[..., Group]) -> None:
    """During a reply, and while nobody asks."""
    group = start(stage_silence_s=2.0)
    reply = group.ask("def ", 30, pauses=True)
    for _ in range(2):
        until(lambda: not group.engine.pause, "all stages")
        group.process(1).suspend()
        reply.go_on()
        until(lambda: "stage 1 has given no sign of life for 2 s" in group.engine.pause, "reason")
    assert isinstance(reply.end(), End) and reply.tokens == alone(["def "], 1, 30)[0]
    until(lambda: not group.engine.pause, "end of the pause")


@pytest.mark.slow
def test_a_stage_that_is_frozen_while_it_loads_is_a_failure_with_a_sentence(
    start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "_LOADING", 2)
    group = start(2, f"{LAYERED}:Frozen", {}, stage_silence_s=5.0)
    until(lambda: bool(group.failures), "its limit")
    assert str(group.failures.pop(0)).startswith("stage 1 of 2 has given no sign of life for 10 s while it loads")
    group.stages.close()
    group.failures.clear()  # of the next process, if there was one


def test_a_stage_that_was_ready_once_may_fail_to_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if nobody has looked at the stages while it was ready."""
    failures, ends = list[Exception](), iter([(True, "has ended"), (False, "has ended")])
    task = Task(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    group = Stages(task, Spec(TaskSpec("", {}), 2, "auto", 1), failures.append)
    remote = group.all[1]
    assert isinstance(remote, stages.RemoteStage)

    def watched(_: object, beats: int) -> tuple[bool, str]:
        if (found := next(ends, None)) is None:
            remote._closed.set()
        return found or (False, "")

    monkeypatch.setattr(remote, "_watch", watched)
    process = SimpleNamespace(kill=lambda: None, wait=lambda: -9)
    monkeypatch.setattr(stages.subprocess, "Popen", lambda *_, **__: process)
    group.start()
    remote.thread.join(DEADLINE_S)
    assert not failures and next(ends, None) is None


class Tied(nn.Sequential):
    def __init__(self) -> None:
        layers = [nn.Linear(4, 4) for _ in range(3)]
        layers[2].weight = layers[0].weight
        super().__init__(*layers)


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class Task:
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self.model = make


@pytest.mark.parametrize(
    ("make", "size", "cut", "message"),
    [
        (Tied, 2, "auto", r"'0.weight' is in stages 0 and 1 \(tied weights\)"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), 2, "auto", "1 layers: too few for 2 stages"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()), 2, [2, 1], "2 layers must be cut into 2 stages"),
        (OneLayer, 2, "auto", "the layers of OneLayer for a pipeline are unknown"),
    ],
)
def test_models_that_cannot_be_cut(make: Any, size: int, cut: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Divided(Task(make), Spec(TaskSpec("", {}), size, cut, 1))


def test_layers_that_take_no_cache_are_refused() -> None:
    task = Gpt(**ARGS | {"num_layers": 3})  # as its cache_shape says
    task.model = Gpt(**ARGS).model  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="cache_shape has 3 layers, but 4 of its 6 layers take `cache`"):
        Divided(task, Spec(TaskSpec("gpt", ARGS), 2, "auto", 1))


def stage_pids(client: Client) -> list[int]:
    children = psutil.Process(client.process.popen.pid).children()
    return [child.pid for child in children if "paramserver.serve.stages" in child.cmdline()]


@pytest.mark.slow
def test_the_command_serves_a_file_over_stages_and_a_kill_is_a_pause_of_a_stream(cluster: Cluster) -> None:
    file = weights_of(cluster.folder / "w.safetensors", Gpt(**SIZES).model())
    plain = serve(cluster, file, "--task", "gpt", *FLAGS)
    client = serve(cluster, file, "--task", "gpt", *FLAGS, "--group", "2", "--set", "worker.cut=[1, 2]")
    assert client.process.event("stages")["layers"] == "1 + 2"
    body = {"prompt": "def ", "max_tokens": 1000, "temperature": 0}
    _, expected, _ = plain.ask("/v1/completions", body)
    texts: list[str] = []
    has_begun = threading.Event()

    def read() -> None:
        for chunk in client.openai().completions.create(model="live", stream=True, **body):
            texts.append(chunk.choices[0].text)
            has_begun.set()

    reading = threading.Thread(target=read)
    reading.start()
    assert has_begun.wait(DEADLINE_S)
    (pid,) = stage_pids(client)
    os.kill(pid, signal.SIGKILL)
    reading.join(DEADLINE_S)
    assert len(texts) > 1 and "".join(texts) == expected["choices"][0]["text"]
    lost, ready = client.process.event("stage_lost"), client.process.events("stage_ready")
    assert (lost["stage"], lost["exit"], len(ready)) == (1, -9, 2)
    client.process.popen.kill()
    (newest,) = [event["pid"] for event in ready[1:]]
    until(lambda: not psutil.pid_exists(newest), "end of the stages")


@pytest.mark.slow
def test_health_and_readiness_name_a_frozen_stage(cluster: Cluster) -> None:
    file = weights_of(cluster.folder / "w.safetensors", Gpt(**SIZES).model())
    flags = ("--task", "gpt", *FLAGS, "--group", "2", "--set", "serve.stage_silence_s=5")
    client, body = serve(cluster, file, *flags), {"prompt": "def ", "max_tokens": 20, "temperature": 0}
    before = client.ask("/v1/completions", body)[1]["choices"]
    (pid,) = stage_pids(client)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: client.ask("/v2/health/ready")[0] == 503, "pause")
    health, refused = client.ask("/health")[1], client.ask("/v2/health/ready")[1]
    reason = "stage 1 has given no sign of life for 5 s (serve.stage_silence_s); it is started again"
    assert (health["status"], health["reason"]) == ("paused", reason)
    assert refused["error"]["message"] == f"replies pause: {reason}"
    assert client.ask("/v1/completions", body)[1]["choices"] == before


@pytest.mark.slow
@pytest.mark.parametrize("group", ["1", "3"])
def test_each_version_of_a_live_run_of_shards_is_whole_in_all_stages(cluster: Cluster, group: str) -> None:
    task = ("--task", f"{LAYERED}:Counted")
    cluster.server(*sources.RUN, "--shards", "2", "--workers", "1")
    cluster.shard(1, 2, *sources.RUN)
    cluster.worker(0, *task, "--set", "slowdown.base_s=0.01")
    client = serve(cluster, "--server", cluster.address, *task, "--every", "1", "--group", group)
    versions: set[int] = set()
    kills = iter(stage_pids(client))
    while len(versions) < 10:
        version, weights = sources.weights_of(client)
        assert weights == [version] * 8
        versions.add(version)
        if len(versions) in (4, 7) and (pid := next(kills, None)) is not None:
            os.kill(pid, signal.SIGKILL)
