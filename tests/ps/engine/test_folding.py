"""Whose memory a contribution is folded from: its worker's, or a copy where it may be answered before the commit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paramserver.common.kinds import ContributionKind
from paramserver.common.wire.records import ContributionId
from paramserver.ps.core import effects
from paramserver.ps.engine.folding import Folding
from paramserver.ps.tensors.staging import StagingPool
from paramserver.ps.tensors.thread import TensorThread

IDENTITY = ContributionId(0, 1, 1)


class Store:
    """Takes note of the bodies that it is to fold."""

    def __init__(self) -> None:
        self.folded: list[torch.Tensor] = []
        self.sanity = self

    def scale(self, body: torch.Tensor, factor: float) -> None:
        body.mul_(int(factor))

    def fold(
        self, body: torch.Tensor, weight: float, rank: int, may_keep: bool, without: frozenset[str], rows: object
    ) -> list[torch.Tensor]:
        self.folded.append(body)
        return []


def folded_from(body: torch.Tensor | None, answers_before_commit: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The body that came and the one that is folded, times 3; None: one of the staging pool."""

    def failed(error: BaseException) -> None:
        raise error

    model: Any = SimpleNamespace(
        store=Store(), staging=StagingPool(1, 4), delivered=None, kind=ContributionKind.GRADIENT
    )
    if body is None:
        body = model.staging.try_borrow(lambda: 0)
        body.fill_(2)
    folding = Folding(model, TensorThread(failed), answers_before_commit)
    folding.stage(IDENTITY, body)
    folding.keep(effects.Keep(IDENTITY))
    folding.fold(effects.Fold(IDENTITY, 1.0, scale=3.0))
    (folded,) = model.store.folded
    assert folded.tolist() == [6, 6, 6, 6]
    return body, folded


def a_workers_memory() -> torch.Tensor:
    return torch.full((4,), 2, dtype=torch.uint8)


def test_what_is_answered_before_its_commit_no_longer_lies_in_its_workers_memory() -> None:
    """The worker writes its next contribution there while this one is in a mean that is not committed."""
    body, folded = folded_from(a_workers_memory(), answers_before_commit=True)
    body.zero_()
    assert folded.tolist() == [6, 6, 6, 6]


@pytest.mark.parametrize("body", [None, a_workers_memory()])
def test_everything_else_is_folded_without_a_copy(body: torch.Tensor | None) -> None:
    body, folded = folded_from(body, answers_before_commit=body is None)
    assert folded is body
