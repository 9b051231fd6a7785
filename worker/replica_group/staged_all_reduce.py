"""All-reduce between workers whose models are pipelines: each stage averages with the same stage of other workers.

    worker 0    stage 0    stage 1   } a completion of each worker, when all of its stages have their mean
                   |          |
    worker 1    stage 0    stage 1

The stages of a generation meet at one store, that of the lowest rank's group rank 0. A round counts for all stages or
for none. The server gets weights, but not the moments, which no process has whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast
from zlib import crc32

import torch

from ...common.errors import UsageError
from ...common.tensors.clipping import scale
from ..conversation.exchange import Exchange
from ..conversation.messages import Outgoing
from ..strategies.all_reduce import AllReduceStrategy
from ..strategies.group import Group as Peers
from ..strategies.peer_state import Mean
from .group import Group
from .member import StageMember


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
