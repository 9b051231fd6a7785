"""Whose memory a contribution is folded from: its worker's, or a copy where it may be replied before the commit. Why a
version was made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from paramserver.common.kinds import ContributionKind
from paramserver.common.wire.records import NO_ROW, Base, Contribution, ContributionId, Counts
from paramserver.ps.core import effects
from paramserver.ps.engine import engine
from paramserver.ps.engine.folding import Folding, Staged
from paramserver.ps.tensors.staging import StagingPool
from paramserver.ps.tensors.thread import TensorThread

from ..streams import Server, served

IDENTITY = ContributionId(0, 1, 1)


class Store:
    """Takes note of the payloads that it is to fold."""

    def __init__(self) -> None:
        self.folded: list[torch.Tensor] = []
        self.sanity = self

    def scale(self, payload: torch.Tensor, factor: float) -> None:
        payload.mul_(int(factor))

    def fold(self, payload: torch.Tensor, *_: Any, **__: Any) -> list[torch.Tensor]:
        self.folded.append(payload)
        return []


def folded_from(
    payload: torch.Tensor | None, replies_before_commit: bool, scale: float = 3.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The payload that came and the one that is folded, scaled; None: one of the staging pool."""

    def failed(error: BaseException) -> None:
        raise error

    model: Any = SimpleNamespace(store=Store(), staging=StagingPool(1, 4), kind=ContributionKind.GRADIENT)
    if payload is None:
        payload = model.staging.try_borrow(0)
        payload.fill_(2)
    committed = {IDENTITY.rank: NO_ROW}
    policy: Any = SimpleNamespace(replies_before_commit=replies_before_commit, committed=committed)
    folding = Folding(model, TensorThread(failed), policy)
    folding.stage(IDENTITY, Staged(payload))
    contribution = Contribution(IDENTITY, base=Base(0), counts=Counts(1, 1, 1))
    folding.taken(effects.ContributionTaken(contribution, 0, "accepted", -1.0))
    folding.fold(effects.Fold(IDENTITY, 1.0, scale=scale))
    (folded,) = model.store.folded
    assert folded.tolist() == [2 * scale] * 4
    return payload, folded


def a_workers_memory() -> torch.Tensor:
    return torch.full((4,), 2, dtype=torch.uint8)


def test_what_gets_a_reply_before_its_commit_no_longer_lies_in_its_workers_memory() -> None:
    """The worker writes its next contribution there while this one is in a mean that is not committed."""
    payload, folded = folded_from(a_workers_memory(), replies_before_commit=True)
    payload.zero_()
    assert folded.tolist() == [6, 6, 6, 6]


@pytest.mark.parametrize("payload", [None, a_workers_memory()])
def test_everything_else_is_folded_without_a_copy(payload: torch.Tensor | None) -> None:
    is_own = payload is None
    payload, folded = folded_from(payload, replies_before_commit=is_own, scale=3.0 if is_own else 1.0)
    assert folded is payload


def test_a_workers_memory_is_not_scaled() -> None:
    """The worker may keep it as a gradient."""
    payload, folded = folded_from(a_workers_memory(), replies_before_commit=False)
    assert folded is not payload and payload.tolist() == [2, 2, 2, 2]


@served(max_staged=2, workers=2, log={"level": "debug"}, policy={"backup_workers": 1})
async def test_a_version_is_logged_with_its_reason(server: Server) -> None:
    lines: list[tuple[str, dict[str, Any]]] = []
    with patch.object(engine.log, "debug", lambda event, **fields: lines.append((event, fields)), create=True):
        workers = await server.workers(2)
        workers[1].contribute()
        await server.settle()
    assert lines == [("commit", {"version": 1, "reason": "1 contributed, 1 of 1 backup workers did not"})]
