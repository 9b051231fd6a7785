"""A model that FSDP2 (`fully_shard`) has divided among the processes of a worker: each has its rows of every tensor.

Inner rank 0 has the conversation with the server, and for it the whole model in host memory, into which the others
send their parts (the mean gradient's, or the weights') and out of which theirs come, each straight from and to where
it lies. So inner rank 0 holds two models more than its part where gradients are sent, one where weights are, and the
others nothing but their parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...common.errors import UsageError
from ...common.reporting.log import get_logger
from ..tensors.transfer import ModelTensors, Source, named_tensors
from .group import Group

log = get_logger()


class _Part(NamedTuple):
    """Of one tensor: along `dim` the processes have as much of it each, the last ones less."""

    name: str
    dim: int | None  # None: all have all of it
    own: DTensor
    whole: torch.Tensor  # inner rank 0's; elsewhere without memory

    def of(self, rank: int, size: int) -> tuple[int, int]:
        """[first, end) along `dim`, as torch.chunk has it."""
        assert self.dim is not None
        num = self.own.shape[self.dim]
        each = -(-num // size)
        return min(num, rank * each), min(num, (rank + 1) * each)

    def cut(self, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """That rank's part of a tensor of the whole's shape; shares its memory."""
        first, end = self.of(rank, size)
        assert self.dim is not None
        return tensor.narrow(self.dim, first, end - first)


class Sharded:
    """`tensors`: what inner rank 0's conversation is about; in the other processes its layout alone."""

    def __init__(self, model: nn.Module, group: Group, stepped: Iterable[torch.Tensor]) -> None:
        self._model, self._group = model, group
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        held = {id(one) for one in stepped}
        whole, made = nn.Module(), dict[int, torch.Tensor]()
        self._parts: list[_Part] = []
        self._plain: list[tuple[Mapping[str, torch.Tensor | None], dict[str, Any], str]] = []  # home, and here
        homes = {
            id(tensor): (kept, key)
            for module in model.modules()
            for kept in (module._parameters, module._buffers)
            for key, tensor in kept.items()
            if tensor is not None
        }
        names: dict[int, str] = {}
        for name, one in named_tensors(model).items():
            names.setdefault(id(one), name)
            if id(one) not in made:
                made[id(one)] = self._whole_of(one, id(one) in held) if isinstance(one, DTensor) else one
                if isinstance(one, DTensor):
                    self._parts.append(_Part(name, self._dim(name, one), one, made[id(one)]))
            place, key = _place_of(whole, name, isinstance(one, nn.Parameter))
            place[key] = made[id(one)]
            if not isinstance(one, DTensor) and id(one) in homes:
                self._plain.append((homes[id(one)][0], place, key))
        self.tensors = ModelTensors(whole, (made[one] for one in held if one in made))
        self.tensors.names |= names
        self._check()
        own, num = sum(part.own.to_local().nbytes for part in self._parts), self.tensors.layout.total_bytes
        log.info("sharded", inner=group.rank, of=group.size, bytes=own, model_bytes=num)

    def _whole_of(self, one: DTensor, is_stepped: bool) -> nn.Parameter:
        device = "meta" if self._group.rank else "cpu"
        memory = torch.empty(one.shape, dtype=one.dtype, device=device)
        return nn.Parameter(memory, requires_grad=one.requires_grad or is_stepped)

    def _dim(self, name: str, one: DTensor) -> int | None:
        mesh, group = one.device_mesh, self._group
        if mesh.mesh.flatten().tolist() != list(range(group.size)) or mesh.ndim != 1:
            raise UsageError(
                f"'{name}' is divided over a mesh of shape {tuple(mesh.mesh.shape)}, and the {group.size} processes of "
                "this worker are a line",
                fix="fully_shard(model) over all of them: no replicas (HSDP), no tensor parallelism",
            )
        (placement,) = one.placements
        if isinstance(placement, Replicate):
            return None
        if type(placement) is not Shard:
            raise UsageError(f"'{name}' is divided as {placement}", fix="Shard(0), which is fully_shard's own")
        return placement.dim

    def _check(self) -> None:
        for part in self._parts:
            if part.dim is None:
                continue
            first, end = part.of(self._group.rank, self._group.size)
            assert part.own.to_local().shape[part.dim] == end - first, (part.name, part.own.to_local().shape)

    def plain_of(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of which each process has the whole."""
        return [one for one in parameters if not isinstance(one, DTensor)]

    # ---- what all do together -----------------------------------------------------------------

    def gather(self, source: Source) -> None:
        """Inner rank 0's whole model has the others' parts: their gradients, or weights."""
        self._look_again()
        is_gradient = source == "gradient"
        with torch.no_grad():
            self._pass((part for part in self._parts if part.own.requires_grad or not is_gradient), is_gradient)

    def scatter(self) -> None:
        """Everyone's part of the model is inner rank 0's of it."""
        for module in self._modules:
            module.reshard()  # what an evaluation has gathered would be stale
        with torch.no_grad():
            self._pass(self._parts, is_gradient=False, is_down=True)
        self._look_again()
        with torch.no_grad():
            self._group.give([place[key].data for _, place, key in self._plain])

    def _look_again(self) -> None:
        """What lies in no parts is the model's own here; a module may have put another in its place."""
        for home, place, key in self._plain:
            place[key] = home[key]

    def _pass(self, parts: Iterable[_Part], is_gradient: bool, is_down: bool = False) -> None:
        group, works = self._group, list[Any]()
        for tag, part in enumerate(parts):
            own = part.own.grad if is_gradient else part.own
            if own is None:
                part.whole.grad = None
                continue
            assert isinstance(own, DTensor)
            local = own.to_local()
            if group.rank:
                if part.dim is not None and local.numel():
                    works += [group.receive(local, 0, tag) if is_down else group.send(local, 0, tag)]
                elif part.dim is None and is_down:
                    works += [group.receive(local, 0, tag)]
                continue
            whole = part.whole.data if not is_gradient else _gradient_of(part.whole)
            for rank in range(group.size):
                if part.dim is None and not is_down and rank:
                    continue  # all have the same
                there = whole if part.dim is None else part.cut(whole, rank, group.size)
                if not there.numel():
                    continue
                if rank == 0:
                    local.copy_(there) if is_down else there.copy_(local)
                else:
                    works += [group.send(there, rank, tag) if is_down else group.receive(there, rank, tag)]
        group.wait(works)


def _gradient_of(whole: torch.Tensor) -> torch.Tensor:
    if whole.grad is None:
        whole.grad = torch.empty_like(whole)
    return whole.grad


def _place_of(root: nn.Module, name: str, is_parameter: bool) -> tuple[dict[str, Any], str]:
    *path, key = name.split(".")
    for one in path:
        root = root._modules.setdefault(one, nn.Module())  # type: ignore[assignment]
    return (root._parameters if is_parameter else root._buffers), key


def sharded_names(model: nn.Module) -> Iterator[str]:
    """Of what is divided among processes."""
    return (name for name, one in named_tensors(model).items() if isinstance(one, DTensor))


def divide(model: nn.Module) -> nn.Module:
    """The model of a task, divided among the processes that the environment names: layers of a list one by one, what
    is left at once. A layer that shares a parameter with another is left."""
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    device = next(model.parameters()).device
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    users: dict[int, int] = {}
    for module in model.modules():
        for one in module.parameters(recurse=False):
            users[id(one)] = users.get(id(one), 0) + 1
    for module in reversed([one for one in model.modules() if isinstance(one, nn.ModuleList | nn.Sequential)]):
        for layer in module.children():
            own = list(layer.parameters())
            if own and not isinstance(layer, nn.ModuleList) and all(users[id(one)] == 1 for one in own):
                fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
