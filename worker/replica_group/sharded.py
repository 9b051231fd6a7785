"""A model that FSDP2 (`fully_shard`) has sharded over the processes of a worker: each has some rows of every tensor.

Each process runs the run's strategy over its own part (`Local`), so copies of a model (an anchor, a snapshot) are
sharded too. The server sees the whole model, which no process has (`redistribution.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from ...common.config.schema import Config
from ...common.errors import UsageError
from ...common.reporting.log import get_logger
from ...common.tensors.layout import Entry, Layout
from ...common.tensors.statistics import statistics_of
from ..conversation.exchange import Exchange
from ..conversation.messages import Settings
from ..strategies.base import Strategy, divided_tensor
from ..strategies.choice import make_server_strategy
from ..tensors.sharing import is_divided
from ..tensors.transfer import ModelTensors, check_still, homes_of, named_tensors
from .group import Group
from .member import GroupMember
from .redistribution import RedistributedTransfer, Redistribution

log = get_logger()


class Local(ModelTensors):
    """This process's part of each tensor, in a separate layout, with names and order of the whole model.

    `absent`: positions, in the layout's specs, of the parameters of any stage of a pipeline that have no gradient.
    """

    absent: tuple[int, ...] | None = None

    def __init__(self, model: nn.Module, whole: Layout, found: Mapping[str, torch.Tensor]) -> None:
        self.module = model
        homes = homes_of(model)
        names = [entry.spec.name for entry in whole.entries]
        self.parts = [found[name] for name in names]
        # A module may replace an unsharded tensor. FSDP2 replaces sharded tensors temporarily.
        homes |= {id(tensor): ({"": tensor}, "") for tensor in self.parts if is_divided(tensor)}
        self._homes = [homes.get(id(tensor), ({"": tensor}, "")) for tensor in self.parts]
        self.names = {id(tensor): name for tensor, name in zip(self.parts, names, strict=True)}
        self.tensors = [_local(tensor) for tensor in self.parts]
        self.places = [tensor.data_ptr() for tensor in self.tensors]
        shapes = {name: tuple(tensor.shape) for tensor, name in zip(self.tensors, names, strict=True)}
        self.layout = Layout(replace(spec, shape=shapes[spec.name]) for spec in whole.specs)
        assert [entry.spec.name for entry in self.layout.entries] == names

    def has_moved(self) -> bool:
        for index, (kept, key) in enumerate(self._homes):
            tensor = kept.get(key)
            if tensor is not self.parts[index]:
                check_still(self.layout.entries[index].spec, tensor, self.parts[index])
                assert tensor is not None
                self.parts[index] = tensor
        self.tensors = [_local(tensor) for tensor in self.parts]
        places = [tensor.data_ptr() for tensor in self.tensors]
        if places == self.places:
            return False
        self.places = places  # another list, because `Watch` compares it by identity
        for entry, tensor in zip(self.layout.entries, self.tensors, strict=True):
            check_still(entry.spec, tensor, tensor)
        return True

    def gradients(self, indices: range) -> list[torch.Tensor | None]:
        found = [part.grad for part in self.parts[indices.start : indices.stop]]
        return [None if gradient is None else _local(gradient) for gradient in found]

    def note_gradients(self, group: Group) -> None:
        """Gather from all stages which parameters have no gradient. Call this before each contribution of a stage."""
        mine = [float(gradient is not None) for gradient in self.gradients(range(self.num_trained))]
        found = [any(column) for column in zip(*group.gather(mine), strict=True)]
        self.absent = tuple(position for position, has in zip(self.positions, found, strict=True) if not has)

    def without_gradient(self) -> tuple[int, ...]:
        return super().without_gradient() if self.absent is None else self.absent


class Sharded:
    """A sharded model: `tensors` is this process's part, `whole` is the model's layout without memory."""

    model: nn.Module

    def __init__(
        self, model: nn.Module, group: Group, stepped: Iterable[torch.Tensor], averaged_buffers: Collection[str]
    ) -> None:
        self.model, self._group = model, group
        self._modules: list[Any] = []
        if divided_tensor(model) is not None:  # the stages of a pipeline need no FSDP, which takes 0.8 s to import
            from torch.distributed.fsdp import FSDPModule

            self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        trained = {id(tensor) for tensor in stepped}
        whole, made = nn.Module(), dict[int, torch.Tensor]()
        found = named_tensors(model)
        for name, item in found.items():
            is_parameter, module = isinstance(item, nn.Parameter), cast(Any, whole)
            if id(item) not in made:
                shape = torch.empty(self._shape(name, item), dtype=item.dtype, device="meta")
                needs = item.requires_grad or id(item) in trained
                made[id(item)] = nn.Parameter(shape, requires_grad=needs) if is_parameter else shape
            *path, key = name.split(".")
            for part in path:
                module = module._modules.setdefault(part, nn.Module())
            (module._parameters if is_parameter else module._buffers)[key] = made[id(item)]
        self.whole = ModelTensors(whole, statistics=statistics_of(model, found, averaged_buffers))
        self.tensors = Local(model, self.whole.layout, found)
        entries = zip(self.whole.layout.entries, self.tensors.parts, strict=True)
        borders = [self._borders(entry, part) for entry, part in entries]
        self.redistribution = redistribution = Redistribution(group.channel("exchange"), borders)
        self.whole.transfer_of = lambda part: RedistributedTransfer(part, redistribution)
        num_bytes, model_bytes = sum(tensor.nbytes for tensor in self.tensors.tensors), self.whole.layout.total_bytes
        log.routine("sharded", group_rank=group.rank, of=group.size, bytes=num_bytes, model_bytes=model_bytes)

    def _shape(self, name: str, item: torch.Tensor) -> torch.Size:
        """Of the whole tensor."""
        return item.shape

    def strategy(self, exchange: Exchange | None, settings: Settings, config: Config) -> Strategy:
        """Return this process's strategy. `exchange` is group rank 0's."""
        return make_server_strategy(GroupMember(exchange, self, settings, config))

    def _borders(self, entry: Entry, tensor: torch.Tensor) -> Sequence[int] | None:
        """Where each process's bytes of a tensor begin, as torch.chunk splits rows.

        None means that all processes have the whole tensor.

        Raises UsageError for a tensor that is sharded in another way.
        """
        from torch.distributed.tensor import DTensor, Replicate, Shard

        name, size = entry.spec.name, self._group.size
        if not isinstance(tensor, DTensor):
            return None
        mesh = tensor.device_mesh
        if mesh.mesh.flatten().tolist() != list(range(size)) or mesh.ndim != 1:
            needed = f"the {size} processes of this worker need a one-dimensional mesh"
            message = f"'{name}' is sharded over a mesh of shape {tuple(mesh.mesh.shape)}, but {needed}"
            fix = "fully_shard(model) over all of them: no replicas (HSDP), no tensor parallelism"
            raise UsageError(message, fix=fix)
        (placement,) = tensor.placements
        if isinstance(placement, Replicate):
            return None
        if type(placement) is not Shard or placement.dim:
            raise UsageError(f"'{name}' is sharded as {placement}", fix="use Shard(0), the default of fully_shard")
        rows, row_bytes = tensor.shape[0], entry.num_bytes // max(1, tensor.shape[0])
        each = -(-rows // size)
        borders = [min(rows, rank * each) * row_bytes for rank in range(size + 1)]
        num_bytes = borders[self._group.rank + 1] - borders[self._group.rank]
        assert tensor.to_local().nbytes == num_bytes, (name, tensor.to_local().shape)
        return borders

    def reshard(self) -> None:
        """Reshard layers that an evaluation has gathered, because they would keep their old weights."""
        for module in self._modules:
            module.reshard()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if not is_divided(tensor):
        return tensor
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        return tensor.to_local()


def divide(model: nn.Module, group: Group) -> nn.Module:
    """Shard a task's model over the processes of this group, layer by layer, then the rest.

    A layer that shares a parameter with another one belongs to the rest.
    """
    from torch.distributed.fsdp import fully_shard

    group.init_torch()
    device = next(model.parameters()).device
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    users = Counter(id(item) for module in model.modules() for item in module.parameters(recurse=False))
    for module in reversed([module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]):
        for layer in module.children():
            parameters = list(layer.parameters())
            is_alone = all(users[id(parameter)] == 1 for parameter in parameters)
            if parameters and is_alone and not isinstance(layer, nn.ModuleList):
                fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
