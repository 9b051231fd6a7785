"""Abilities of a mode, which other code queries; nothing here counts or decides."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

from ....common.config.option import Section
from ....common.kinds import ContributionKind
from ....common.wire.records import GroupInfo
from ..rules import Rule
from .decisions import Outer


class Traits:
    """The defaults; a mode overrides those that differ."""

    # The mode's own options: a subclass beside its policy, whose fields `--help` and the configuration show.
    Options: ClassVar[type[Section]] = Section
    # The rules of its histories, beyond those of every mode.
    rules: ClassVar[tuple[type[Rule], ...]] = ()
    kind: ContributionKind = ContributionKind.GRADIENT  # what workers send
    # A commit is one step along the gradients of all, so a robust aggregate may replace their mean
    # (policy.aggregation).
    may_aggregate: ClassVar[bool] = False
    # Workers may compute their next contribution while an exchange is in flight (policy.delayed_update), from this
    # policy.staleness on.
    may_delay_update: ClassVar[bool] = False
    least_delayed_staleness: ClassVar[int] = 0
    # A version is a round of all live workers, who all get it. The run's length is then counted in versions, and not
    # in each worker's contributions.
    has_rounds: ClassVar[bool] = False
    # A step may be made of the contributions of several workers, which must have the same hyperparameters.
    steps_jointly: ClassVar[bool] = False
    # A contribution may get its reply when it is folded, before its version exists. Its payload must then be in memory
    # that its worker does not write to again.
    replies_before_commit: ClassVar[bool] = False
    # Commits may carry scales, so the script alone does not determine a contribution's effect on the weights.
    may_scale: bool = False
    # A step has a share for each contribution. A skipped one (store.on_nonfinite) counts as zeros, so that the others
    # do not move its share.
    skipped_is_zeros: ClassVar[bool] = False
    # A version may be made of the sum of gradients instead of their mean: a contribution's weight is its samples.
    may_sum: ClassVar[bool] = True
    # Several optimizers of a model may step by turns (session.optimizers).
    may_step_by_turns: ClassVar[bool] = False
    changeable: ClassVar[tuple[str, ...]] = ()  # options that may change while the run goes on (`Policy.change`)
    over_generation: int = 0  # the newest generation of peers of which a member has left
    local_steps: int = 1  # training steps in one contribution
    pull_every: int = 1  # workers fetch weights with every Nth contribution
    fragments: int = 1  # parts of the parameters, of which each contribution has one by turns
    outstanding: int = 0  # means of peers that may be outstanding while a worker continues
    overlap_steps: int = 0  # local steps of a worker during an exchange of deltas; 0: all up to the next contribution
    newest_holders: AbstractSet[int] = frozenset()  # ranks whose workers have the newest weights; the server lacks them

    @classmethod
    def summary(cls, options: Any) -> str:
        """Returns the text beside the mode's name, such as `staleness 3`; empty where there is none."""
        return ""

    @property
    def outer(self) -> Outer | None:
        """The outer optimizer, where workers contribute deltas. It may change from commit to commit."""
        return None

    @property
    def staleness_bound(self) -> int | None:
        """The lead with which a worker may still continue; in rounds, the versions that a gradient may be behind. None:
        no bound."""
        return None

    @property
    def has_newest_weights(self) -> bool:
        """Whether the server has the weights of the newest version."""
        return True

    def weights_uploaded(self) -> None:
        """Note that the server has the newest weights now."""

    def group_info(self, rank: int) -> GroupInfo | None:
        """The group that this worker averages in; None where workers have no peers."""
        return None

    def upload_position(self, rank: int) -> int:
        """Contributions that are folded before this worker's; uploads are staged in this order."""
        return 0
