"""A mode that replies a contribution before it is committed (FedBuff, Nguyen et al. 2022); for tests.

Each is folded and replied at once; a version is made of `size` of them, from whomever, or of what is left when
everyone has taken all training steps.
"""

from __future__ import annotations

from pydantic import Field

from paramserver.common.config.option import Section
from paramserver.ps.policies.base import Common, Contribution, Decision, Fold, Member, Policy

BUFFERED = f"{__file__}:Buffered"


class BufferedOptions(Section):
    size: int = Field(3, ge=1, description="buffered: contributions in a version")


class Buffered(Policy):
    Options = BufferedOptions
    options: BufferedOptions
    replies_before_commit = True

    def __init__(self, common: Common, options: BufferedOptions) -> None:
        super().__init__(common, options)
        self.buffer: list[int] = []  # ranks whose contributions are folded, in that order

    def _take(self, member: Member, contribution: Contribution, now: float) -> list[Decision]:
        self._count(member, contribution.counts)
        self.buffer.append(member.rank)
        return [Fold(member.rank, self._weight(contribution))]

    def _advance(self, now: float) -> list[Decision]:
        is_last = self.buffer and not any(map(self.next_local_steps, self.members))
        if len(self.buffer) < self.options.size and not is_last:
            return []
        ranks, self.buffer = tuple(self.buffer), []
        return [self._commit(ranks, f"{len(ranks)} contributions")]
