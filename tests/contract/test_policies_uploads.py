"""Uploads are staged in the order in which a policy folds them, so none waits for another for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.ps.policies.base import Commit, Discard, Fold, Reply
from paramserver.ps.tensors.staging import StagingPool
from paramserver.tests.contract.policies import ALL_MODES, make_policy

from ..ps.streams import turns
from ..records import contribution_of


class Uploads:
    """Workers that upload into a real StagingPool in the order a real policy gives."""

    def __init__(self, mode: str, limit: int, num_workers: int, options: dict[str, Any]) -> None:
        self.policy = make_policy(mode, num_workers=num_workers, max_staged=limit, **options)
        self.pool = StagingPool(limit, 8)
        self.steps: dict[int, int] = {}
        self.wants: dict[int, asyncio.Future[Any]] = {}  # ask for memory
        self.payloads: dict[int, Any] = {}  # upload
        self.staged: dict[int, Any] = {}  # accepted, not folded
        self.mean: Any = None
        self.computing: set[int] = set()
        self.all_payloads: set[int] = set()

    def join(self, rank: int) -> None:
        self.perform(self.policy.joined(rank, 0.0))

    def ask(self, rank: int) -> None:
        self.computing.remove(rank)
        self.wants[rank] = self.pool.request(lambda: self.policy.upload_position(rank))

    def collect(self) -> None:
        for rank, task in list(self.wants.items()):
            if task.done():
                del self.wants[rank]
                self.payloads[rank] = task.result()
                self.all_payloads.add(id(task.result()))
        assert len({id(payload) for payload in [*self.payloads.values(), *self.staged.values()]}) == self.pool.num_lent
        assert self.pool.num_lent <= self.pool.limit

    def complete(self, rank: int) -> None:
        self.staged[rank] = self.payloads.pop(rank)
        contribution = contribution_of(self.policy.seq(rank) + 1, self.policy.version)
        self.perform(self.policy.contributed(rank, contribution, 0.0))

    async def leave(self, rank: int) -> None:
        if rank in self.wants:
            self.pool.withdraw(self.wants.pop(rank))
        elif rank in self.payloads:
            self.pool.give_back(self.payloads.pop(rank))
        self.computing.discard(rank)
        self.perform(self.policy.left(rank, 0.0))

    def perform(self, decisions: list[Any]) -> None:
        for decision in decisions:
            match decision:
                case Fold(rank):
                    payload = self.staged.pop(rank)
                    if self.mean is None:
                        self.mean = payload
                        self.pool.donate(payload)
                    else:
                        self.pool.give_back(payload)
                case Commit():
                    self.pool.reclaim([self.mean])
                    self.mean = None
                case Reply(rank):
                    self.computing.add(rank)
                case Discard(rank):
                    self.pool.give_back(self.staged.pop(rank))
        self.pool.look_again()


@pytest.mark.parametrize("mode", [mode for mode in ALL_MODES if mode != "allreduce"])  # there only one uploads
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_uploads_never_wait_for_each_other_for_ever(mode: str, data: st.DataObject) -> None:
    """With any number of payloads and any order of arrival, somebody who asked for memory has it."""

    async def play() -> None:
        num_workers = data.draw(st.integers(1, 8))
        options = data.draw(st.sampled_from([{}, {"staleness": 2}, {"backup_workers": 1}]))
        options = options if num_workers > options.get("backup_workers", 0) else {}
        uploads = Uploads(mode, data.draw(st.integers(1, 4)), num_workers, options)
        for rank in range(num_workers):
            uploads.join(rank)
        next_rank = num_workers
        for _ in range(data.draw(st.integers(5, 60))):
            actions: list[tuple[str, int]] = [("ask", rank) for rank in sorted(uploads.computing)]
            actions += [("complete", rank) for rank in sorted(uploads.payloads)]
            if next_rank < num_workers + 2:
                actions.append(("join", next_rank))
            if len(uploads.policy.members) > 1:
                actions += [("leave", rank) for rank in sorted(uploads.policy.members)]
            away = [rank for rank in range(num_workers) if rank not in uploads.policy.members]
            actions += [("return", rank) for rank in away if rank not in uploads.staged]  # its own would be another
            action, rank = data.draw(st.sampled_from(actions))
            if action == "join":
                uploads.join(rank)
                next_rank += 1
            elif action == "return":
                uploads.join(rank)
            elif action == "leave":
                await uploads.leave(rank)
            else:
                getattr(uploads, action)(rank)
            await turns(2)  # for coroutines whose future was resolved, and for what they in turn resolve
            uploads.collect()
            if uploads.wants and not uploads.computing:
                assert uploads.payloads, f"ranks {sorted(uploads.wants)} wait for memory that nobody gives back"
        # At most what may be lent, the mean, and one more while the mean is exchanged.
        assert len(uploads.all_payloads) <= uploads.pool.limit + 2

    asyncio.run(play())
