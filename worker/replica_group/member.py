"""The exchangers of a worker of several processes: of a sharded model (see "sharded" below), and of stages.

Each process runs the run's strategy over its own part of the model, and all exchange with the server together. Group
rank 0 has the conversation, for the whole model. Meanwhile the others send and receive their bytes
(`redistribution.py`), and then get its result.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple, TypeVar, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn

from ...common.config.schema import Config
from ...common.errors import ParamServerError, UsageError
from ...common.kinds import ContributionKind
from ...common.reporting.log import get_logger
from ...common.tensors.layout import Entry, Layout
from ...common.tensors.optimizers import OptimizerSpec, scale
from ...common.tensors.statistics import statistics_of
from ...common.wire.messages import read_reply, reply_message
from ...common.wire.records import GroupInfo, Position, RateInfo, Reply, Row
from ..conversation.channel import GroupView, worker_credentials
from ..conversation.exchange import Exchange
from ..conversation.messages import Begun, Final, Goodbye, Outgoing, ReplyMessage, Settings, loses_replies
from ..session import Progress
from ..strategies.all_reduce import AllReduceStrategy
from ..strategies.base import Strategy, divided_tensor
from ..strategies.choice import make_server_strategy
from ..strategies.group import Group as Peers
from ..strategies.peer_state import Mean
from ..tensors.transfer import ModelTensors, check_still, homes_of, is_divided, named_tensors
from .group import Group
from .redistribution import RedistributedTransfer, Redistribution

log = get_logger()

Result = TypeVar("Result", ReplyMessage, Final)


class ProgressLink:
    """Sends group rank 0's progress to the other processes, with the state that its newest START named."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.begun: Begun | None = None
        self._num_starts = -1  # at the newest message

    def message(self, begun: Begun | None, **fields: Any) -> dict[str, Any]:
        """Build group rank 0's message, as JSON values."""
        found = {"progress": vars(self.progress), **fields}
        if self._num_starts != self.progress.num_starts:
            self._num_starts, self.begun = self.progress.num_starts, begun
            payload = b64encode(begun.payload).decode() if begun else ""
            found["begun"] = begun and {"position": asdict(begun.position), "payload": payload}
        return found

    def take(self, message: Mapping[str, Any]) -> None:
        """Load a message of group rank 0 in another process."""
        found = message["progress"]
        replay = tuple(found["after_replay"] or ()) or None
        read = {"row": Row(*found["row"]), "rates": RateInfo(*found["rates"]), "after_replay": replay}
        self.progress.become(Progress(**{**found, **read}))
        if "begun" in message:
            begun = message["begun"]
            self.begun = begun and Begun(Position(**begun["position"]), b64decode(begun["payload"]))


class GroupMember(ProgressLink):
    """An `Exchanger`. `exchange` is group rank 0's, and `sharded.whole` is the model as the server sees it."""

    def __init__(self, exchange: Exchange | None, sharded: Sharded, settings: Settings, config: Config) -> None:
        self._exchange, self._whole, self._redistribution = exchange, sharded.whole, sharded.redistribution
        self.settings, self.replies_lose, self.stop_reason = settings, loses_replies(config.worker, settings), ""
        super().__init__(exchange.progress if exchange is not None else Progress())
        self.measured: list[dict[str, Any]] = exchange.measured if exchange is not None else []
        self._local: ModelTensors  # this process's part
        self._redistribution.find = self._find

    def _find(self, kind: str, index: int) -> torch.Tensor | None:
        if not kind or index >= self._local.num_exchanged:
            return self._local.tensors[index]
        return self._local.sources(ContributionKind(kind), range(index, index + 1))[0]

    # ---- together -----------------------------------------------------------------------------

    def _together(self, work: Callable[[Exchange], Result | None], kind: type[Result]) -> Result | None:
        """Run `work` in group rank 0. Returns its result, or raises its error, in all processes."""
        if self._exchange is None:
            message = self._redistribution.follow()
            self.take(message)
            return None if message["result"] is None else kind.FromString(b64decode(message["result"]))
        exchange = self._exchange
        exchange.stop_reason = self.stop_reason
        self._redistribution.begin()
        try:
            result = work(exchange)
        except ParamServerError as error:
            self._redistribution.fail(error)
            raise
        payload = None if result is None else b64encode(result.SerializeToString()).decode()
        self._redistribution.end(self.message(exchange.begun, result=payload))
        return result

    def start(self, model: ModelTensors, optimizer: OptimizerSpec) -> None:
        self._local = model
        self._together(lambda exchange: exchange.start(self._whole, optimizer), Final)

    def contribute(self, outgoing: Outgoing) -> Reply:
        message = self._together(lambda exchange: reply_message(exchange.contribute(outgoing)).reply, ReplyMessage)
        assert message is not None
        return read_reply(message)

    def finish(self) -> Final | None:
        return self._together(lambda exchange: exchange.finish(), Final)

    def pull_exact(self, model: ModelTensors) -> int:
        found = self._together(lambda exchange: Final(version=exchange.pull_exact(self._whole)), Final)
        assert found is not None
        return found.version

    # ---- group rank 0's alone -----------------------------------------------------------------

    def pull_optimizer(self) -> dict[str, dict[str, torch.Tensor]]:
        if self._exchange is None:
            raise no_optimizer_here(self._redistribution.rank)
        return self._exchange.pull_optimizer()

    def moved(self) -> None:
        """Does nothing, because `_local` is looked up each time."""

    def leave(self, goodbye: Goodbye) -> None:
        if self._exchange is not None:
            self._exchange.stop_reason = self.stop_reason
            self._exchange.leave(goodbye)

    def drop(self) -> None:
        if self._exchange is not None:
            self._exchange.drop()


class StageMember(GroupMember):
    """A GroupMember that knows the server's facts about peers."""

    def __init__(self, exchange: Exchange | None, sharded: Sharded, settings: Settings, config: Config) -> None:
        super().__init__(exchange, sharded, settings, config)
        self.config, self.server = config.worker, config.worker.server
        self.credentials = exchange.credentials if exchange is not None else worker_credentials(config)
        self.group_view = exchange.group_view if exchange is not None else GroupView()

    def message(self, begun: Begun | None, **fields: Any) -> dict[str, Any]:
        info = self.group_view.info
        return super().message(begun, **fields, peers={**asdict(info), "secret": info.secret.hex()})

    def take(self, message: Mapping[str, Any]) -> None:
        super().take(message)
        info = message["peers"]
        secret, members = bytes.fromhex(info["secret"]), tuple(info["members"])
        self.group_view.info = GroupInfo(**{**info, "secret": secret, "members": members})

    def contribute(self, outgoing: Outgoing) -> Reply:
        return super().contribute(outgoing._replace(optimizer=None))

    def pull_optimizer(self) -> dict[str, dict[str, torch.Tensor]]:
        return {}


def no_optimizer_here(rank: int) -> UsageError:
    message = f"group rank {rank}: optimizer.state_dict() is fetched from the server"
    return UsageError(message, fix="call it in group rank 0 only: if session.group_rank == 0")


# ---- sharded -------------------------------------------------------------------------------------
# A model that FSDP2 (`fully_shard`) has sharded over the processes of a worker: each has some rows of every tensor.
#
# Each process runs the run's strategy over its own part (`Local`), so copies of a model (an anchor, a snapshot) are
# sharded too. The server sees the whole model, which no process has (`redistribution.py`).


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


# ---- staged all reduce ---------------------------------------------------------------------------
# All-reduce between workers whose models are pipelines: each stage averages with the same stage of other workers.
#
#     worker 0    stage 0    stage 1   } a completion of each worker, when all of its stages have their mean
#                    |          |
#     worker 1    stage 0    stage 1
#
# The stages of a generation meet at one store, that of the lowest rank's group rank 0. A round counts for all stages
# or for none. The server gets weights, but not the moments, which no process has whole.


class Placement(NamedTuple):
    """Where the pieces of a model are: layers [first, end) of each piece, and its group rank."""

    ranges: Sequence[tuple[int, int]]
    ranks: Sequence[int]


class StagedAllReduce(AllReduceStrategy):
    """The rounds of one stage."""

    def __init__(self, member: StageMember, group: Group, placement: Placement) -> None:
        super().__init__(cast(Exchange, member), False, group.rank)  # it has what this strategy uses of an exchange
        self._worker, self._placement = group, placement

    def _together(self, is_done: bool) -> bool:
        """Whether all stages of this worker have done it."""
        return all(found[0] for found in self._worker.gather([float(is_done)]))

    def _form_group(self) -> bool:
        return self._together(super()._form_group())

    def _joined(self, group: Peers) -> None:
        cuts = self._lifecycle.run(lambda: group.gather_numbers(crc32(repr(self._placement).encode())))
        if cuts[group.index] != cuts[0]:
            rank, counts = group.generation.members[group.index], [end - at for at, end in self._placement.ranges]
            lowest = f"rank {group.generation.members[0]}, with which it averages stage by stage"
            message = f"rank {rank} has cut the layers into {counts}, and {lowest}, in another way"
            raise UsageError(message, fix="give all workers the same --group, worker.schedule and worker.cut")
        super()._joined(group)

    def _mean_of(self, gradients: Sequence[torch.Tensor | None], outgoing: Outgoing, is_right: bool) -> Mean | None:
        mean = super()._mean_of(gradients, outgoing, is_right)
        return mean if self._together(mean is not None) else None

    def _clip(self, mean: Mean, max_norm: float) -> None:
        scale([item for item in mean if item is not None], joint_norm(self._worker, mean), max_norm)


def joint_norm(group: Group, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The 2-norm of the gradients of all stages; each is in one process, and has a place in all."""
    mine = [0.0 if item is None else float(torch.linalg.vector_norm(item)) for item in gradients]
    found = group.gather([*mine, *(float(item is not None) for item in gradients)])
    sums = [sum(column) for column in zip(*found, strict=True)]  # only one process has a gradient
    norms = zip(sums[: len(mine)], sums[len(mine) :], strict=True)
    return torch.linalg.vector_norm(torch.tensor([norm for norm, is_there in norms if is_there], device="cpu"))
