"""A pipeline whose stages run in the processes of a worker.

    group rank 0   layers 0..k   | F0 F1 F2 F3 ........ B0 B1 B2 B3   activations down, gradients up
    group rank 1   layers k+1..n |    F0 B0 F1 B1 F2 B2 F3 B3

Each process builds the whole model and keeps the tensors of its own layers. It replaces all other tensors by empty
tensors, and keeps their shapes (`StagedPipeline.whole`). The server sees one worker with the whole model (`Staged`).

`chain.py` runs 1F1B and GPipe on CPUs. `torch.distributed.pipelining` runs all other schedules, and all on GPUs. It is
imported only then (`load`), because that takes 1.5 s.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...common.config.schema import Config
from ...common.config.sections.processes import WorkerConfig
from ...common.errors import UnreachableError, UsageError
from ...common.kinds import ContributionKind
from ...common.reporting.log import get_logger
from ...common.tensors.layout import Entry
from ..conversation.exchange import Exchange
from ..conversation.messages import Settings
from ..strategies.base import Strategy
from ..tensors.transfer import named_tensors
from ..training.evaluation import untouched
from ..training.pipeline import Example, LossFn, Once, Pipeline, compute, inputs_of, on_meta, output_of, reseed
from ..training.tasks.init import read_tensors
from . import chain
from .chain import Border, Chain, with_gradient
from .cut import Costs, Stage, bubble, cut
from .group import WATCH_S, Group
from .member import Placement, Sharded, StagedAllReduce, StageMember

log = get_logger()

_V_SHAPED = ("zbvzerobubble", "dualpipev")  # process i has pieces i and 2G - 1 - i
_ALL_UNDER_WAY = ("gpipe", "loopedbfs")  # these schedules keep the activations of all microbatches
_REPEATS = 5  # runs of each layer in a measurement
_TIMEOUT = timedelta(hours=6)  # of one message; the group's watch notices a dead process much earlier
_OF_A_LAYER = "failed to run forward"  # torch's schedules wrap an exception of a layer in a RuntimeError with this text


def is_chain(schedule: str, device: torch.device) -> bool:
    """Returns whether `chain.py` runs this schedule."""
    return schedule.lower() in chain.NAMES and device.type == "cpu"


def load(schedule: str, device: torch.device) -> None:
    """Import torch's schedules if this one needs them. That takes seconds, in which a server must not wait."""
    if not is_chain(schedule, device):
        import torch.distributed.pipelining.schedules  # noqa: F401


def num_pieces(schedule: str) -> int:
    """Returns the number of pieces in each process. Raises UsageError for a schedule that torch does not have."""
    if schedule.lower() in chain.NAMES:
        return 1
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    try:
        found = get_schedule_class(schedule)
    except ValueError:
        names = "1F1B, GPipe, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV"
        raise UsageError(f"worker.schedule is {schedule!r}, and torch has no such schedule", fix=names) from None
    return 1 if issubclass(found, PipelineScheduleSingle) else 2


def ranks_of(schedule: str, size: int) -> list[int]:
    """Returns the group rank of each piece."""
    once = list(range(size))
    if num_pieces(schedule) == 1:
        return once
    return [*once, *reversed(once)] if schedule.lower() in _V_SHAPED else once * 2


# ---- costs ------------------------------------------------------------------------------------


def measure(module: nn.Module, layers: Sequence[nn.Module], loss: LossFn, batch: Any) -> Costs:
    """Measure the costs of each layer for this microbatch, in this process. The model does not change."""
    seconds, kept, saved = [], [], []
    with untouched(nn.Module() if on_meta(module) else module):  # `measure` copies layers that are on the meta device
        module.train()
        inputs = inputs_of(loss, batch)
        for index, layer in enumerate(layers):
            if on_meta(layer):  # copied one by one, to bound the memory
                layer = copy.deepcopy(layer).to_empty(device=inputs.device)
                with torch.no_grad():
                    for item in (*layer.parameters(), *layer.buffers()):
                        item.zero_()
            trained = [item for item in layer.parameters() if item.requires_grad]
            known = {item.untyped_storage().data_ptr() for item in layer.parameters()}
            times = []
            for _ in range(_REPEATS):
                storages: dict[int, int] = {}

                def keep(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                    return tensor

                leaf = inputs.detach().requires_grad_(inputs.is_floating_point())
                began = time.perf_counter()
                with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.enable_grad():
                    output = output_of(layer, leaf, index)
                wanted = [item for item in (*trained, leaf) if item.requires_grad]
                if wanted and output.requires_grad:
                    torch.autograd.grad(with_gradient(output, torch.ones_like(output)), wanted, allow_unused=True)
                times.append(time.perf_counter() - began)
            seconds.append(min(times))  # other load on the machine can only make a run slower
            saved.append(sum(storages[pointer] for pointer in storages.keys() - known) + output.nbytes)
            kept.append(sum(item.nbytes for item in layer.parameters()))
            inputs = output.detach()
    return Costs(seconds, kept, saved)


def estimate(layers: Sequence[nn.Module]) -> Costs:
    """Returns costs without a measurement: the time of a layer is proportional to its parameters."""
    kept = [float(sum(item.nbytes for item in layer.parameters())) for layer in layers]
    return Costs([num_bytes + 1 for num_bytes in kept], kept, [0.0] * len(layers))


# ---- pieces -----------------------------------------------------------------------------------


class Piece(nn.Module):
    """Consecutive layers in one process."""

    def __init__(self, pipeline: StagedPipeline, layers: Sequence[nn.Module], first: int) -> None:
        super().__init__()
        self.layers, self._first = nn.ModuleList(layers), first
        self._pipeline = (pipeline,)  # in a tuple, so that it is not a submodule
        self.number = 0  # number of the next microbatch

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        pipeline, number = self._pipeline[0], self.number
        self.number += 1
        with pipeline._casting():
            return compute(list(self.layers), self._first, inputs, number, pipeline.seed)


class StagedPipeline(Pipeline):
    """The part of a pipeline in one process of a worker."""

    def __init__(
        self, module: nn.Module, layers: Sequence[nn.Module], loss: LossFn, group: Group, config: WorkerConfig,
        kind: ContributionKind, example: Example | None = None, init: str | None = None,
    ) -> None:  # fmt: skip
        """Blocks until all processes have measured their layers. Raises UsageError if the layers cannot be cut."""
        super().__init__(module, layers, loss, config.microbatches or 2 * group.size)
        self._group, self._config = group, config
        group.init_torch(_TIMEOUT)
        self.device = group.device if on_meta(module) else next(module.parameters()).device
        self.placement = self._assign(kind, example)
        self._shapes = [
            {name: (item.shape, item.dtype, item.requires_grad) for name, item in named_tensors(layer).items()}
            for layer in layers
        ]
        found = named_tensors(module)
        self.owners = self._owners(found)
        self.whole = {name: torch.empty_like(item, device="meta") for name, item in found.items()}
        self._keep_own(found, init)
        self._pieces: dict[int, Piece] = {}
        for index, ((first, end), rank) in enumerate(zip(*self.placement, strict=True)):
            if rank == group.rank:
                self._pieces[index] = Piece(self, layers[first:end], first)
        self._schedules: dict[Any, Any] = {}
        # The seed, the microbatches, the factor of their losses, and the losses of the current step.
        self.seed, self._parts, self._scale, self._losses = 0, list[Any](), 1.0, list[float]()

    # ---- the cut ------------------------------------------------------------------------------

    def _assign(self, kind: ContributionKind, example: Example | None) -> Placement:
        group, config, num = self._group, self._config, len(self.layers)
        example = None if kind.has_peers else example  # all workers have the same cut
        ranks = ranks_of(config.schedule, group.size)
        if num < len(ranks):
            stages = f"{len(ranks)} stages" if len(ranks) == group.size else f"{len(ranks)} stages, 2 in each process"
            message = f"the model has {num} layers, but {config.schedule} with {group.size} processes needs {stages}"
            raise UsageError(message, fix=f"--group {max(1, num * group.size // len(ranks))} or less, or more layers")
        here = estimate(self.layers)
        if example is not None:
            here = measure(self.module, self.layers, self._loss, example(self._microbatches))
        times = group.gather(here.seconds)
        medians = [statistics.median(item) for item in zip(*times, strict=True)]
        extra = kind.holds_differences or kind.has_peers  # the anchor, or the mean
        factor = 2 + 2 * kind.worker_steps + extra  # weights, gradients, moments
        costs = Costs(medians, [factor * item for item in here.kept_bytes], here.batch_bytes)
        speeds = [sum(medians) / max(1e-9, sum(item)) for item in times]
        if config.cut == "auto":
            limit = (config.memory or float("inf")) * group.size / len(ranks)
            limits = [Stage(speeds[rank], self._in_flight(index), limit) for index, rank in enumerate(ranks)]
            counts = cut(costs, limits)
            if counts is None:
                needed = sum(costs.kept_bytes) + sum(costs.batch_bytes)
                message = f"no cut of the {num} layers fits each process into {config.memory:,} bytes (worker.memory)"
                fix = f"use more processes or microbatches: all layers need at least {needed:,.0f} bytes"
                raise UsageError(message, fix=fix)
        else:
            counts = list(config.cut)
            if len(counts) != len(ranks) or sum(counts) != num:
                message = f"worker.cut is {counts}, but {num} layers must be cut into {len(ranks)} stages"
                raise UsageError(message, fix=f"give {len(ranks)} numbers whose sum is {num}, or auto")
        ends = [sum(counts[: index + 1]) for index in range(len(counts))]
        ranges = [(end - count, end) for count, end in zip(counts, ends, strict=True)]
        stage_s = [sum(medians[first:end]) for first, end in ranges]
        self.plan = {  # for `ps-launch doctor --pipeline`
            "counts": counts, "schedule": config.schedule, "microbatches": self._microbatches, "stage_s": stage_s,
            "bubble": (idle := bubble(group.size, self._microbatches, len(ranks) // group.size)),
        }  # fmt: skip
        if not group.rank:
            log.info(
                "pipeline", stages=" + ".join(map(str, counts)), schedule=config.schedule,
                microbatches=self._microbatches,
                cut="by hand" if config.cut != "auto" else "by parameters" if example is None else "measured",
                ms=None if example is None else [round(1000 * seconds, 1) for seconds in stage_s],
                bytes=[int(sum(costs.kept_bytes[first:end])) for first, end in ranges],
                bubble=round(idle, 3),
            )  # fmt: skip
        return Placement(ranges, ranks)

    def _in_flight(self, index: int) -> int:
        """The most microbatches whose activations a piece keeps at once."""
        schedule, num = self._config.schedule, self._microbatches
        if is_chain(schedule, self.device):
            return self._ahead(index, num)
        if schedule.lower() in _ALL_UNDER_WAY:
            return num
        return min(num, len(ranks_of(schedule, self._group.size)) - index)

    def _ahead(self, index: int, num: int) -> int:
        return chain.num_ahead(self._config.schedule, self._group.size, index, num, self._config.memory is None)

    def _owners(self, found: dict[str, torch.Tensor]) -> dict[str, int]:
        """Returns the group rank that owns each tensor. Raises UsageError if two stages share a tensor."""
        names = {id(item): name for name, item in found.items()}
        users: dict[int, tuple[int, int]] = {}  # the first layer that has a tensor, and its group rank
        for (first, end), rank in zip(*self.placement, strict=True):
            for index in range(first, end):
                for item in (*self.layers[index].parameters(), *self.layers[index].buffers()):
                    user, owner = users.setdefault(id(item), (index, rank))
                    if owner != rank and id(item) in names:  # each process keeps buffers that are not saved
                        where = f"layers {user} and {index} of the pipeline (tied weights)"
                        ranks = f"the stages of group ranks {owner} and {rank}"
                        fix = "untie them, or keep both layers in one stage (--set worker.cut=[...])"
                        raise UsageError(f"'{names[id(item)]}' is in {where}, but these are in {ranks}", fix=fix)
        return {name: users.get(id(item), (0, 0))[1] for name, item in found.items()}

    def _keep_own(self, found: dict[str, torch.Tensor], init: str | None) -> None:
        """Replace tensors of other processes by empty tensors. Read this process's tensors from `init`."""
        firsts = {id(item): name for name, item in reversed(found.items())}  # tied tensors have their first name
        shapes = {name: found[name].shape for name in firsts.values()}
        local = [name for name in shapes if self.owners[name] == self._group.rank]
        read = read_tensors(init, shapes, local) if init is not None else {}
        read |= {name: torch.empty((0, *shapes[name][1:]), device="cpu") for name in shapes.keys() - {*local}}
        new: dict[int, torch.Tensor] = {}
        while read:  # each is freed when it is on the device
            name, tensor = read.popitem()
            item, tensor = found[name], tensor.to(self.device, found[name].dtype)
            new[id(item)] = nn.Parameter(tensor, item.requires_grad) if isinstance(item, nn.Parameter) else tensor
        for module in (item for whole in (self.module, *self.layers) for item in whole.modules()):
            for registry in (module._parameters, module._buffers):
                for key, tensor_or_none in registry.items():
                    registry[key] = new.get(id(tensor_or_none), tensor_or_none)  # type: ignore[assignment]

    # ---- a step -------------------------------------------------------------------------------

    def _accumulate(self, batch: Any, parts: list[Any], scale: float, seed: int) -> float:
        inputs = inputs_of(self._loss, batch)
        self.seed, self._parts, self._scale, self._losses = seed, parts, scale, []
        for piece in self._pieces.values():
            piece.number = 0
        schedule = self._schedule(inputs, len(parts))
        with self._watched():
            if isinstance(schedule, Chain):
                schedule.step(inputs)
            else:
                arguments = (inputs,) if 0 in self._pieces else ()
                is_last = len(self.placement.ranks) - 1 in self._pieces
                target = torch.arange(len(parts), device="cpu") if is_last else None
                schedule.step(*arguments, target=target, return_outputs=False)
        self._parts = []
        mean = sum(self._losses) / len(self._losses) if self._losses else 0.0
        return self._group.gather([mean])[self.placement.ranks[-1]][0]

    def _loss_of(self, output: torch.Tensor, number: Any) -> torch.Tensor:
        """Returns the loss of microbatch `number` of the current step, in the process of the last piece."""

        def through(_: torch.Tensor) -> torch.Tensor:
            reseed(self.seed, int(number), len(self.layers))
            return output

        with self._casting():
            loss = self._loss(Once(through), self._parts[int(number)])
        self._losses.append(float(loss.detach()))
        return loss * self._scale

    def _schedule(self, inputs: torch.Tensor, num: int) -> Any:
        key = (inputs.shape, inputs.dtype, num, self._autocast)
        if key in self._schedules:
            return self._schedules[key]
        name, rank, size, loss = self._config.schedule, self._group.rank, self._group.size, self._loss_of
        if is_chain(name, self.device):
            self._schedules[key] = Chain(self._pieces[rank], self._group, num, self._ahead(rank, num), loss)
            return self._schedules[key]
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        match name.lower():  # another schedule with the same pieces, if this one does not accept `num` microbatches
            case "1f1b" if num < size:
                name = "GPipe"
            case "dualpipev" if num < 2 * size:
                name = "ZBVZeroBubble"
            case "interleaved1f1b" | "interleavedzerobubble" if num % max(1, num // size):
                name = "LoopedBFS"
        borders, total = self.borders(inputs[: len(inputs) // num]), len(self.placement.ranks)
        pieces = self._pieces.items()
        stages = [PipelineStage(piece, at, total, self.device, borders[at], borders[at + 1]) for at, piece in pieces]
        given = stages[0] if num_pieces(name) == 1 else stages
        self._schedules[key] = get_schedule_class(name)(given, num, loss_fn=loss, scale_grads=False)
        return self._schedules[key]

    def borders(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        """Returns the inputs of each piece for a microbatch with these inputs, and the last outputs, as meta tensors.

        It runs the layers on fake tensors. Raises UsageError if a layer does not return a tensor.
        """
        found = []
        begins = {first for first, _ in self.placement.ranges}
        with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]), self._casting():
            fake = torch.empty(inputs.shape, dtype=inputs.dtype, device=self.device)
            for index, (layer, shapes) in enumerate(zip(self.layers, self._shapes, strict=True)):
                if index in begins:
                    found.append(fake)
                tensors = {
                    name: torch.empty(shape, dtype=dtype, device=self.device).requires_grad_(needs)
                    for name, (shape, dtype, needs) in shapes.items()
                }
                output = output_of(layer, fake, index, tensors)
                fake = output.detach().requires_grad_(output.requires_grad)
            found.append(fake)
        return [torch.empty_like(item, device="meta").requires_grad_(item.requires_grad) for item in found]

    @torch.no_grad()
    def _outputs(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute a whole batch, stage after stage. Returns the outputs in all processes."""
        ranks, rank, value = self.placement.ranks, self._group.rank, inputs
        with self._watched():
            for index, owner in enumerate(ranks):
                before = ranks[index - 1] if index else owner
                if rank == before != owner:
                    Border.of(value).send(self._group, owner)
                    dist.send(value.contiguous(), owner)
                elif rank == owner != before:
                    value = Border.receive(self._group, before).empty(self.device)
                    dist.recv(value, before)
                if rank == owner:
                    for number, layer in enumerate(self._pieces[index].layers, self.placement.ranges[index][0]):
                        value = output_of(layer, value, number)
            numbers = self._group.gather(Border.of(value).numbers())[ranks[-1]]
            if rank != ranks[-1]:
                value = Border.from_numbers([int(item) for item in numbers]).empty(self.device)
            value = value.contiguous()
            dist.broadcast(value, ranks[-1])
        return value

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Turn errors of torch.distributed into UnreachableError.

        It waits first: if a process has died, the group's watch ends this process with a message that names it.
        """
        try:
            yield
        except RuntimeError as error:
            if error.__cause__ is not None and _OF_A_LAYER in str(error):
                raise error.__cause__ from None
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                time.sleep(WATCH_S)
                message = f"group rank {self._group.rank}: this worker's stages lost their connection: {error}"
                raise UnreachableError(message) from None
            raise


class Staged(Sharded):
    """The model of a pipeline. Each tensor is in one process, as a whole."""

    model: StagedPipeline

    def strategy(self, exchange: Exchange | None, settings: Settings, config: Config) -> Strategy:
        if not settings.kind.has_peers:
            return super().strategy(exchange, settings, config)
        member = StageMember(exchange, self, settings, config)
        return StagedAllReduce(member, self._group, self.model.placement)

    def _shape(self, name: str, item: torch.Tensor) -> torch.Size:
        return self.model.whole[name].shape

    def _borders(self, entry: Entry, tensor: torch.Tensor) -> Sequence[int]:
        """Returns the bounds of each group rank's part of the tensor: its owner has all bytes."""
        owner, size = self.model.owners[entry.spec.name], self._group.size
        return [0] * (owner + 1) + [entry.num_bytes] * (size - owner)
