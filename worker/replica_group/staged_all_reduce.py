"""All-reduce between workers whose models are pipelines: each stage averages with the same stage of other workers.

    worker 0    stage 0    stage 1   } a completion of each worker, when all of its stages have their mean
                   |          |
    worker 1    stage 0    stage 1

The stages of a generation meet at one store, that of the lowest rank's group rank 0. A round counts for all stages or
for none. The server gets weights, but not the moments, which no process has whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, cast
from zlib import crc32

import torch

from ...common.config.schema import Config
from ...common.errors import UsageError
from ...common.tensors.clipping import scale
from ...common.wire.records import GroupInfo, Reply
from ..conversation.exchange import Exchange
from ..conversation.heartbeat import GroupView
from ..conversation.messages import Outgoing, Settings, loses_replies
from ..conversation.security import worker_credentials
from ..strategies.all_reduce import AllReduceStrategy
from ..strategies.group import Group as Peers
from ..strategies.peer_state import Mean
from ..tensors.transfer import ModelTensors
from .group import Group
from .member import GroupMember
from .redistribution import Redistribution


class Placement(NamedTuple):
    """Where the pieces of a model are: layers [first, end) of each piece, and its group rank."""

    ranges: Sequence[tuple[int, int]]
    ranks: Sequence[int]


class StageMember(GroupMember):
    """A GroupMember that knows the server's facts about peers."""

    def __init__(
        self, exchange: Exchange | None, config: Config, whole: ModelTensors, redistribution: Redistribution,
        settings: Settings,
    ) -> None:  # fmt: skip
        super().__init__(exchange, whole, redistribution, settings, loses_replies(config.worker, settings))
        self.config, self.server = config.worker, config.worker.server
        self.credentials = exchange.credentials if exchange is not None else worker_credentials(config)
        self.group_view = exchange.group_view if exchange is not None else GroupView()

    def _message(self, exchange: Exchange, **fields: Any) -> dict[str, Any]:
        info = self.group_view.info
        return super()._message(exchange, **fields, peers={**asdict(info), "secret": info.secret.hex()})

    def _take(self, message: Mapping[str, Any]) -> None:
        super()._take(message)
        info = message["peers"]
        secret, members = bytes.fromhex(info["secret"]), tuple(info["members"])
        self.group_view.info = GroupInfo(**{**info, "secret": secret, "members": members})

    def contribute(self, outgoing: Outgoing) -> Reply:
        return super().contribute(outgoing._replace(optimizer=None))

    def pull_optimizer(self) -> dict[str, dict[str, torch.Tensor]]:
        return {}


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
            raise UsageError(
                f"rank {rank} has cut the layers into {counts}, and rank {group.generation.members[0]}, with which it "
                "averages stage by stage, in another way",
                fix="give all workers the same --group, worker.schedule and worker.cut",
            )
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
