"""What async and ssp share: every contribution is one optimizer step at once."""

from __future__ import annotations

from typing import ClassVar

from .base import Contribution, Decision, Fold, Member, Policy
from .rules import Rule, SingleRule


class SinglePolicy(Policy):
    may_pipeline = True
    rules: ClassVar[tuple[type[Rule], ...]] = (SingleRule,)

    def _take(self, member: Member, contribution: Contribution, now: float) -> list[Decision]:
        self._count(member)
        return [
            Fold(member.rank, self._weight(contribution)),
            self._commit((member.rank,), f"contribution {contribution.number} of rank {member.rank}"),
        ]
