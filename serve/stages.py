"""Serves a model whose layers are cut into stages, each in its own process (`ps-serve --group G`).

    engine -> stage 0, in its process -> stage 1 -> back -> stage 2 -> back -> the next tokens

The process of the engine sends the hidden states of a step to each stage over a pair of sockets, and reads its output.
The weights of all slots are in shared memory without a name. The engine's process writes it in windows and maps only
the part of stage 0. So no process maps the whole model, and a stage that is started again has the weights of the same
versions at once. Only its part of the cache is lost. The engine computes it again.
"""

from __future__ import annotations

import inspect
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from itertools import accumulate, pairwise
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple

import torch
from torch import nn

from ..common.config.option import SERVE
from ..common.config.schema import LogConfig
from ..common.errors import ParamServerError, UsageError
from ..common.reporting.log import get_logger, setup_logging
from ..common.tensors.layout import DTYPES, Layout, as_bytes
from ..common.wire.json_text import read_json
from ..worker.replica_group.cut import Costs, cut
from ..worker.replica_group.cut import Stage as Limits
from ..worker.replica_group.redistribution import Finish, Range, RedistributedTransfer
from ..worker.tensors.transfer import ModelTensors, named_tensors
from ..worker.training.pipeline import check_tensor, check_weights, layers_of
from .errors import Paused
from .models import CacheView, LanguageModel, Rows, language_model
from .slots import NUM_SLOTS
from .task import TaskSpec

log = get_logger()

_BACKOFF_S = 30.0  # at most between two starts of a stage
_BEAT_S = 0.5  # between two signs of life of a stage
# Loading may be one call into a library, which stops the thread of the signs. It may be silent so many times as long.
_LOADING = 30
_ALIVE, _READY = b".", b"r"  # a sign of life; the stage is ready
_ENDED = "has ended"


class Spec(NamedTuple):
    """What a process needs to know to compute a stage. It travels as JSON."""

    task: TaskSpec
    size: int  # number of stages
    cut: list[int] | str
    num_rows: int  # of the cache
    threads: int = 1
    silence_s: float = 10.0  # without a sign of life, after which a stage is started again


class Divided:
    """A model on the meta device, its layers cut into stages, and the layout of each stage's tensors."""

    def __init__(self, task: Any, spec: Spec) -> None:
        """Raises UsageError for a model that cannot be cut."""
        self._task = task
        self.module, self.layers = self.fresh()
        check_weights(self.module, "")
        self.kind = language_model(task, self.module)
        self.ranges = _ranges(self.layers, spec)
        takes = [inspect.signature(layer.forward).parameters.keys() for layer in self.layers]
        self.caching = [index for index, names in enumerate(takes) if {"cache", "layer"} <= names]
        if self.kind is not None and self.kind.uses_cache and len(self.caching) != self.kind.cache_shape[0]:
            have = f"{len(self.caching)} of its {len(self.layers)} layers take `cache` and `layer`"
            message = f"the task's cache_shape has {self.kind.cache_shape[0]} layers, but {have}"
            raise UsageError(message, fix="let forward() of each layer with attention take them; docs/serving.md")
        layout = ModelTensors(self.module).layout
        self.names = [entry.spec.name for entry in layout.entries]  # of the tensors, by index
        self.specs = {spec.name: spec for spec in layout.specs}
        owners = self._owners()
        self.layouts: list[Layout] = []  # by stage
        self.places: dict[str, tuple[int, int]] = {}  # by tensor: its stage, and its offset there
        for stage in range(spec.size):
            layout = Layout(item for name, item in self.specs.items() if owners[name] == stage)
            self.layouts.append(layout)
            self.places |= {entry.spec.name: (stage, entry.offset) for entry in layout.entries}

    def fresh(self) -> tuple[nn.Module, list[nn.Module]]:
        """Return a new model on the meta device, and its layers."""
        with torch.device("meta"):
            module, layers = layers_of(self._task.model())
        module.eval()
        return module, layers

    def slot_bytes(self, stage: int) -> int:
        """Return the bytes of a stage's tensors, in whole pages."""
        return -(-max(1, self.layouts[stage].total_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE

    def kind_with(self, num_caching: int) -> LanguageModel | None:
        """Return how the model is run, with a cache of so many layers."""
        if (kind := copy(self.kind)) is not None:
            kind.cache_shape = num_caching, *kind.cache_shape[1:]
        return kind

    def _owners(self) -> dict[str, int]:
        """Return the stage of each tensor. Raises UsageError if two stages share a tensor."""
        found, owners = named_tensors(self.module), dict[str, int]()
        names = {id(item): name for name, item in reversed(found.items())}  # the first name of a tied tensor
        for stage, (first, end) in enumerate(self.ranges):
            for layer in self.layers[first:end]:
                for item in (*layer.parameters(), *layer.buffers()):
                    name = names.get(id(item))
                    if name is not None and owners.setdefault(name, stage) != stage:
                        message = f"'{name}' is in stages {owners[name]} and {stage} (tied weights)"
                        raise UsageError(message, fix="keep both layers in one stage: --set worker.cut=[...]")
        return {name: owners.get(name, 0) for name in self.specs}


def _ranges(layers: Sequence[nn.Module], spec: Spec) -> list[tuple[int, int]]:
    """Return the first and the end layer of each stage: as given, or stages with about equally many bytes."""
    num_bytes = [float(sum(item.nbytes for item in layer.parameters())) for layer in layers]
    costs = Costs([item + 1 for item in num_bytes], num_bytes, [0.0] * len(layers))
    counts = spec.cut if isinstance(spec.cut, list) else cut(costs, [Limits()] * spec.size)
    if counts is None:
        message = f"the model has {len(layers)} layers: too few for {spec.size} stages (serve.group)"
        raise UsageError(message, fix=f"--group {len(layers)} or less")
    if len(counts) != spec.size or sum(counts) != len(layers):
        message = f"worker.cut is {counts}, but {len(layers)} layers must be cut into {spec.size} stages"
        raise UsageError(message, fix=f"give {spec.size} numbers whose sum is {len(layers)}, or auto")
    return list(pairwise([0, *accumulate(counts)]))


class Stage:
    """The layers of a stage, with the weights of each slot, and their part of the cache."""

    def __init__(self, divided: Divided, index: int, memory: int, num_rows: int) -> None:
        num_bytes, (first, end) = divided.slot_bytes(index), divided.ranges[index]
        mapped = torch.frombuffer(mmap.mmap(memory, num_bytes * NUM_SLOTS), dtype=torch.uint8)
        self.slots: list[list[nn.Module]] = []
        for slot in range(NUM_SLOTS):
            module, layers = divided.fresh()
            found, replaced = named_tensors(module), dict[int, torch.Tensor]()
            for entry in divided.layouts[index].entries:
                before, tensor = found[entry.spec.name], entry.view(mapped[slot * num_bytes :])
                is_parameter = isinstance(before, nn.Parameter)
                replaced[id(before)] = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
            for item in (item for layer in layers[first:end] for item in layer.modules()):
                for registry in (item._parameters, item._buffers):
                    for key, value in registry.items():
                        registry[key] = replaced.get(id(value), value)  # type: ignore[assignment]
            self.slots.append(layers[first:end])
        self._first, self._is_last = first, index == len(divided.ranges) - 1
        caching = [layer for layer in divided.caching if first <= layer < end]
        self._numbers = {layer: number for number, layer in enumerate(caching)}  # of the layers in the cache
        kind = divided.kind_with(len(caching))
        self._cache = kind.new_cache(divided.module, num_rows) if kind is not None else None

    def compute(self, slot: int, inputs: torch.Tensor, rows: Rows | None) -> torch.Tensor:
        """Return the output of the layers. `rows`: of the cache; only the last token's output is then needed."""
        view = None if rows is None or self._cache is None else self._cache.view(*rows)
        for index, layer in enumerate(self.slots[slot], self._first):
            if view is not None and index in self._numbers:
                inputs = layer(inputs, cache=view, layer=self._numbers[index])
            else:
                inputs = layer(inputs)
            check_tensor(inputs, layer, index)
        return inputs[:, -1:] if rows is not None and self._is_last else inputs


def _send(link: Connection, message: Mapping[str, Any], tensor: torch.Tensor | None = None) -> None:
    """Send a message of JSON, with a tensor or none. Raises OSError once the other end is closed."""
    if tensor is None:
        link.send_bytes(json.dumps(message).encode())
        return
    form = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    link.send_bytes(json.dumps({**message, **form}).encode())
    link.send_bytes(as_bytes(tensor.contiguous()))


def _receive(link: Connection) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Return a message and its tensor. Raises OSError or EOFError once the other end is closed."""
    message: dict[str, Any] = read_json(link.recv_bytes())
    if "shape" not in message:
        return message, None
    tensor = torch.empty(message["shape"], dtype=DTYPES[message["dtype"]])
    link.recv_bytes_into(as_bytes(tensor))
    return message, tensor


class RemoteStage:
    """A stage in another process, which a thread starts, and starts again when it dies."""

    def __init__(self, stages: Stages, index: int, memory: int) -> None:
        self._stages, self._index, self._memory = stages, index, memory
        self.link: Connection | None = None  # of a process that is ready
        self.problem = f"stage {index} is starting"  # empty while there is a link
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"stage {index}", daemon=True)

    def close(self) -> None:
        self._closed.set()
        if self._process is not None:
            self._process.kill()
        self.thread.join()

    def compute(self, slot: int, inputs: torch.Tensor, rows: Rows | None) -> torch.Tensor:
        """As `Stage.compute`. Raises Paused if the process has died."""
        link, ended = self.link, f"stage {self._index} has ended"
        if link is None or self._stages.has_lost:  # this may be another process than the one that has the cache
            raise Paused(self.problem or ended)
        try:
            _send(link, {"slot": slot, "rows": rows}, inputs)
            message, output = _receive(link)
        except (OSError, EOFError):
            if self.link is link:  # not that of a newer process
                self.link, self.problem = None, ended
            raise Paused(self.problem or ended) from None
        if output is None:
            raise RuntimeError(f"stage {self._index}: {message['error']}")
        return output

    def _run(self) -> None:
        num_failures, was_ready = 0, False
        try:
            while not self._closed.is_set():
                # `link` is closed with its last user: a request may still wait for its reply.
                (link, there), (beats, beating) = Pipe(), os.pipe()
                fds = there.fileno(), beating, self._memory
                command = [sys.executable, "-m", __name__, *map(str, (*fds, self._index))]
                self._process = subprocess.Popen(command, pass_fds=fds)
                there.close()
                os.close(beating)
                if self._closed.is_set():
                    self._process.kill()
                with suppress(OSError):  # it has ended
                    _send(link, self._stages.spec._asdict())
                is_ready, reason = self._watch(link, beats)
                self.link, self.problem = None, f"stage {self._index} {reason}; it is started again"
                self._process.kill()  # it may be frozen
                code = self._process.wait()
                os.close(beats)
                if self._closed.is_set():
                    return
                num_failures, was_ready = 0 if is_ready else num_failures + 1, was_ready or is_ready
                self._stages.lost(self._index, code, reason, was_ready)
                self._closed.wait(min(_BACKOFF_S, 2.0**num_failures - 1))
        except Exception as error:  # a process cannot be started
            self._stages.failed(error)

    def _watch(self, link: Connection, beats: int) -> tuple[bool, str]:
        """Return when the process has ended or is silent: whether it was ready, and what happened."""
        is_ready, polling = False, select.poll()
        limit_s = self._stages.spec.silence_s * _LOADING
        polling.register(beats, select.POLLIN)
        while polling.poll(limit_s * 1000):
            found = os.read(beats, 1 << 10)
            if not found:
                return is_ready, _ENDED
            if _READY in found:
                limit_s = self._stages.spec.silence_s
                assert self._process is not None
                self.link, self.problem, is_ready = link, "", True
                log.info("stage_ready", stage=self._index, pid=self._process.pid)
                self._stages.has_changed()
        state = "" if is_ready else " while it loads"
        return is_ready, f"has given no sign of life for {limit_s:g} s{state} (serve.stage_silence_s)"


class Stages:
    """All stages of a model. `failed` is called if a stage cannot be started for the first time."""

    def __init__(self, task: Any, spec: Spec, failed: Callable[[Exception], None]) -> None:
        self.spec, self.failed = spec, failed
        self.divided = divided = Divided(task, spec)
        self.kind = divided.kind_with(0)  # the engine's cache has no layers: each stage has its part
        self.has_lost = False  # a process has died, with its part of the cache; the engine resets it
        self.has_changed: Callable[[], None] = lambda: None  # called when a stage is ready
        self.memory = [_memory(divided.slot_bytes(index) * NUM_SLOTS) for index in range(spec.size)]
        local = Stage(divided, 0, self.memory[0], spec.num_rows)
        self._remote = [RemoteStage(self, index, self.memory[index]) for index in range(1, spec.size)]
        self.all: list[Stage | RemoteStage] = [local, *self._remote]
        self.models = [SlotModel(self, slot, layers) for slot, layers in enumerate(local.slots)]
        log.info(
            "stages", layers=" + ".join(str(end - first) for first, end in divided.ranges),
            bytes=[layout.total_bytes for layout in divided.layouts],
        )  # fmt: skip

    @property
    def problem(self) -> str:
        """The stages that are away, and why. Empty: none."""
        return "; ".join(stage.problem for stage in self._remote if stage.problem)

    def start(self) -> None:
        for stage in self._remote:
            stage.thread.start()

    def close(self) -> None:
        for stage in self._remote:
            stage.close()

    def lost(self, index: int, code: int, reason: str, was_ready: bool) -> None:
        """Note that the process of a stage has ended. `was_ready`: this process, or an earlier one of the stage."""
        self.has_lost = True
        if not was_ready:
            message, fix = f"ended with exit code {code} before it was ready", "its own message is above"
            if reason != _ENDED:
                message, fix = reason, "look at its task and its disk, or raise serve.stage_silence_s"
            self.failed(ParamServerError(f"stage {index} of {self.spec.size} {message}", fix=fix))
        meaning = "replies pause until it is started again"
        log.warning("stage_lost", stage=index, exit=code, reason=reason, meaning=meaning)


class SlotModel(nn.Module):
    """The model of one slot. Sources write weights through `transfer_of` or `write`, because `whole` has no memory."""

    def __init__(self, stages: Stages, slot: int, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)  # of stage 0
        self._stages, self._slot = stages, slot

    @property
    def whole(self) -> nn.Module:
        return self._stages.divided.module

    def forward(self, inputs: torch.Tensor, cache: CacheView | None = None) -> torch.Tensor:
        """Return the output of all layers. Raises Paused."""
        for stage in self._stages.all:
            inputs = stage.compute(self._slot, inputs, None if cache is None else cache.rows)
        return inputs

    def transfer_of(self, part: ModelTensors) -> RedistributedTransfer:
        """Return a transfer that writes windows of a payload to the memory of the stages."""
        return RedistributedTransfer(part, self)  # type: ignore[arg-type]

    def move(self, window: torch.Tensor, ranges: Sequence[Range], _: str | None) -> Finish:
        """Write a window, as a Redistribution does."""
        for index, first, end, at in ranges:
            self.write(self._stages.divided.names[index], window[at : at + end - first], first)
        return lambda: None

    def write(self, name: str, tensor: torch.Tensor, at: int = 0) -> None:
        """Write a tensor, or its bytes from `at` on."""
        data, divided = as_bytes(tensor.contiguous()), self._stages.divided
        stage, offset = divided.places[name]
        begin = self._slot * divided.slot_bytes(stage) + offset + at
        while data:
            num = os.pwrite(self._stages.memory[stage], data, begin)
            data, begin = data[num:], begin + num


def _memory(num_bytes: int) -> int:
    """Return a descriptor of shared memory without a name. It exists as long as a process has it."""
    memory = os.memfd_create("paramserver-serve")
    os.ftruncate(memory, num_bytes)
    return memory


def _beat(beating: int) -> None:
    """Give signs of life, also during a long step, until the process of the engine ends."""
    with suppress(OSError):
        while True:
            os.write(beating, _ALIVE)
            time.sleep(_BEAT_S)


def _run(end: int, beating: int, memory: int, index: int) -> None:
    """Compute a stage until the process of the engine ends."""
    threading.Thread(target=_beat, args=(beating,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the engine's process ends this one
    setup_logging(LogConfig(level="error"), SERVE)  # process 0 logs the rest
    link = Connection(end)
    found, _ = _receive(link)
    spec = Spec(**found | {"task": TaskSpec(*found["task"])})
    torch.set_num_threads(spec.threads)
    stage = Stage(Divided(spec.task.load(), spec), index, memory, spec.num_rows)
    os.write(beating, _READY)
    with torch.no_grad():
        while True:
            message, inputs = _receive(link)
            assert inputs is not None
            try:
                output = stage.compute(message["slot"], inputs, message["rows"])
            except Exception as error:  # the reply of this request
                _send(link, {"error": f"{type(error).__name__}: {error}"})
            else:
                _send(link, {}, output)


if __name__ == "__main__":
    try:
        _run(*map(int, sys.argv[1:]))
    except (OSError, EOFError):
        sys.exit(0)
