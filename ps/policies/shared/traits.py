"""What a mode is able to do. Others ask these questions; nothing here counts or decides."""

from __future__ import annotations

from typing import Any, ClassVar

from ....common.config.option import Section
from ....common.kinds import ContributionKind
from ....common.wire.records import GroupInfo
from ..rules import Rule
from .decisions import Merge, Outer
from .late import Compensation


class Traits:
    """A mode overrides what differs from these defaults."""

    # The mode's own options: a subclass beside its policy, whose fields `--help` and the configuration show.
    Options: ClassVar[type[Section]] = Section
    # What its histories must keep to, beyond what holds in every mode.
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
    # A contribution may be replied to when it is folded, before its version is there. Its payload then lies in no
    # memory that its worker writes to again.
    replies_before_commit: ClassVar[bool] = False
    # Commits may carry scales, so that what a contribution does to the weights is not the script's alone.
    may_scale: bool = False
    # A version may be made of the sum of gradients instead of their mean: a contribution weighs its samples.
    may_sum: ClassVar[bool] = True
    # Modes with the same name here may take over from each other while workers train (`Policy.take_over`): their
    # workers do the same, and their contributions count the same. Empty: no mode takes over.
    compatible_modes: ClassVar[str] = ""
    changeable: ClassVar[tuple[str, ...]] = ()  # options that may change while the run goes on (`Policy.change`)
    compensation: Compensation | None = None  # of a late gradient, before it is folded
    over_generation: int = 0  # the newest generation of peers of which a member has left

    @classmethod
    def summary(cls, options: Any) -> str:
        """The text beside the mode's name, such as `staleness 3`; empty where there is nothing to say."""
        return ""

    @property
    def local_steps(self) -> int:
        """Training steps in one contribution."""
        return 1

    @property
    def outer(self) -> Outer | None:
        """The server's own optimizer, where deltas are contributed. It may change from commit to commit."""
        return None

    @property
    def pull_every(self) -> int:
        """Workers fetch weights with every Nth contribution."""
        return 1

    @property
    def fragments(self) -> int:
        """Parts of the parameters, of which each contribution has one by turns."""
        return 1

    @property
    def outstanding(self) -> int:
        """Means of peers that a worker may go on without."""
        return 0

    @property
    def merge(self) -> Merge:
        """How workers merge deltas with the local steps taken meanwhile (policy.delayed_update)."""
        return Merge()

    @property
    def staleness_bound(self) -> int | None:
        """Lead with which a worker may still go on; in rounds, the versions that a gradient may be behind. None: no
        bound."""
        return None

    @property
    def has_newest_weights(self) -> bool:
        """Whether the server has the weights of the newest version."""
        return True

    def group_info(self, rank: int) -> GroupInfo | None:
        """The group that this worker averages in; None where workers have no peers."""
        return None

    def upload_position(self, rank: int) -> int:
        """Contributions that are folded before this worker's; uploads are staged in this order."""
        return 0
