"""A model that FSDP2 (`fully_shard`) has sharded over the processes of a worker: each has some rows of every tensor.

Each process runs the run's strategy over its own part (`Local`), so copies of a model (an anchor, a snapshot) are
sharded too. The server sees the whole model, which no process has (`redistribution.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...common.config.schema import Config
from ...common.errors import UsageError
from ...common.reporting.log import get_logger
from ...common.tensors.layout import Entry, Layout
from ...common.tensors.statistics import statistics_of
from ..conversation.exchange import Exchange
from ..conversation.messages import Settings, loses_replies
from ..strategies.base import Strategy, divided_tensor
from ..strategies.choice import make_server_strategy
from ..tensors.sharing import is_divided
from ..tensors.transfer import ModelTensors, check_still, homes_of, named_tensors
from .group import Group
from .member import GroupMember
from .redistribution import RedistributedTransfer, Redistribution

log = get_logger()


class Sharded:
    """A sharded model: `tensors` is this process's part, `whole` is the model's layout without memory."""

    def __init__(
        self, model: nn.Module, group: Group, stepped: Iterable[torch.Tensor], averaged_buffers: Collection[str] = ()
    ) -> None:
        self._modules: list[Any] = []
        if divided_tensor(model) is not None:  # the stages of a pipeline need no FSDP, which takes 0.8 s to import
            from torch.distributed.fsdp import FSDPModule

            self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._group = group
        trained = {id(tensor) for tensor in stepped}
        whole, made = nn.Module(), dict[int, torch.Tensor]()
        found = named_tensors(model)
        for name, item in found.items():
            if id(item) not in made:
                shape = torch.empty(self._shape(name, item), dtype=item.dtype, device="meta")
                is_parameter = isinstance(item, nn.Parameter)
                needs = item.requires_grad or id(item) in trained
                made[id(item)] = nn.Parameter(shape, requires_grad=needs) if is_parameter else shape
            registry, key = _place_of(whole, name, isinstance(item, nn.Parameter))
            registry[key] = made[id(item)]
        self.whole = ModelTensors(whole, statistics=statistics_of(model, found, averaged_buffers))
        self.tensors = self._local(model, self.whole.layout, found)
        borders = [
            self._borders(entry, self.tensors.parts[index]) for index, entry in enumerate(self.whole.layout.entries)
        ]
        self._redistribution = redistribution = Redistribution(group.channel("exchange"), borders)
        self.whole.transfer_of = lambda part: RedistributedTransfer(part, redistribution)
        num_bytes, model_bytes = sum(tensor.nbytes for tensor in self.tensors.tensors), self.whole.layout.total_bytes
        log.routine("sharded", inner=group.rank, of=group.size, bytes=num_bytes, model_bytes=model_bytes)

    def _shape(self, name: str, item: torch.Tensor) -> torch.Size:
        """Of the whole tensor."""
        return item.shape

    def _local(self, *arguments: Any) -> Local:
        return Local(*arguments)

    def strategy(self, exchange: Exchange | None, settings: Settings, config: Config) -> Strategy:
        """Return this process's strategy. `exchange` is group rank 0's."""
        return make_server_strategy(
            GroupMember(exchange, self.whole, self._redistribution, settings, loses_replies(config.worker, settings))
        )

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
            raise UsageError(
                f"'{name}' is sharded over a mesh of shape {tuple(mesh.mesh.shape)}, but the {size} processes of "
                "this worker need a one-dimensional mesh",
                fix="fully_shard(model) over all of them: no replicas (HSDP), no tensor parallelism",
            )
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


class Local(ModelTensors):
    """This process's part of each tensor, in a separate layout, with names and order of the whole model."""

    def __init__(self, model: nn.Module, whole: Layout, found: Mapping[str, torch.Tensor]) -> None:
        self.module = model
        homes = homes_of(model)
        self.parts = [found[entry.spec.name] for entry in whole.entries]
        # A module may replace an unsharded tensor. FSDP2 replaces sharded tensors temporarily.
        self._homes = [
            ({"": tensor}, "") if is_divided(tensor) else homes.get(id(tensor), ({"": tensor}, ""))
            for tensor in self.parts
        ]
        self.names = {id(tensor): entry.spec.name for tensor, entry in zip(self.parts, whole.entries, strict=True)}
        self.tensors, self.places = list[torch.Tensor](), list[int]()
        self._look()
        shapes = {
            entry.spec.name: tuple(tensor.shape) for tensor, entry in zip(self.tensors, whole.entries, strict=True)
        }
        self.layout = Layout(replace(spec, shape=shapes[spec.name]) for spec in whole.specs)
        assert [entry.spec.name for entry in self.layout.entries] == [entry.spec.name for entry in whole.entries]

    def _look(self) -> None:
        self.tensors = [_local(tensor) for tensor in self.parts]
        self.places = [tensor.data_ptr() for tensor in self.tensors]

    def has_moved(self) -> bool:
        for index, (kept, key) in enumerate(self._homes):
            tensor = kept.get(key)
            if tensor is not self.parts[index]:
                check_still(self.layout.entries[index].spec, tensor, self.parts[index])
                assert tensor is not None
                self.parts[index] = tensor
        before = self.places
        self._look()
        if self.places == before:
            self.places = before  # `Watch` compares the list by identity
            return False
        for entry, tensor in zip(self.layout.entries, self.tensors, strict=True):
            check_still(entry.spec, tensor, tensor)
        return True

    def gradient(self, index: int) -> torch.Tensor | None:
        gradient = self.parts[index].grad
        return None if gradient is None else _local(gradient)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if not is_divided(tensor):
        return tensor
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        return tensor.to_local()


def _place_of(root: nn.Module, name: str, is_parameter: bool) -> tuple[dict[str, Any], str]:
    *path, key = name.split(".")
    for item in path:
        root = root._modules.setdefault(item, nn.Module())  # type: ignore[assignment]
    return (root._parameters if is_parameter else root._buffers), key


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
