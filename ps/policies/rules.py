"""What the history of a run in some mode must keep to, beyond what holds in every mode. Pure.

`ps-launch check` makes a mode's rules from the `start` line of the history (mode, options) and asks them about
the lines that follow; of a mode in a file where its user names the file (--mode). A rule of your own is a subclass,
named in `Policy.rules`. Each question gets its reply with a sentence where the rule is broken, with None where it is
kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class Rule:
    """One rule; `start` has the fields of the history's start line, `options` what the mode's own were in that run."""

    begins_late: ClassVar[bool] = False  # who is new may wait for its START while those it began with go on, or go

    def __init__(self, start: Mapping[str, Any]) -> None:
        self.start = start
        self.options: Mapping[str, Any] = start["options"]

    def changed(self, name: str, value: Any) -> None:
        """An option was set while the run went on."""
        self.options = {**self.options, name: value}
        if name in self.start:  # `staleness`, as the bound of a lead
            self.start = {**self.start, name: value}

    def counted(self, rank: int, number: int, base_version: int, version: int) -> str | None:
        """A contribution, computed on `base_version`, counts while the newest version is `version`."""
        return None

    def committed(self, version: int, num_contributions: int, missing: Sequence[int]) -> str | None:
        """A version is made of so many contributions, without the live ranks that are missing."""
        return None

    def replied(self, rank: int, lead: int) -> str | None:
        """A rank may go on, with so many contributions more than the slowest live one."""
        return None


class RoundRule(Rule):
    """A version is one contribution of every live worker, unless rounds may close without some."""

    def counted(self, rank: int, number: int, base_version: int, version: int) -> str | None:
        if base_version == version:
            return None
        return (
            f"rank {rank} contribution {number} stands on version {base_version} and is accepted in the round "
            f"after version {version}"
        )

    def committed(self, version: int, num_contributions: int, missing: Sequence[int]) -> str | None:
        may_lack = any(self.options.get(name) for name in ("straggler_timeout_s", "straggler_mad", "backup_workers"))
        if not missing or may_lack:
            return None
        return f"version {version} was made without the live rank {', '.join(map(str, missing))}"


class GroupRule(RoundRule):
    """A version is one contribution of every member of a group, which a worker is in from the next round on."""

    begins_late = True

    def counted(self, rank: int, number: int, base_version: int, version: int) -> str | None:
        bound = int(self.options["staleness"])
        if version - base_version <= bound:
            return None
        if not bound:
            return super().counted(rank, number, base_version, version)
        message = f"rank {rank} contribution {number} stands on version {base_version} and is accepted at {version}"
        return f"{message}: at most {bound} may lie between"


class SingleRule(Rule):
    """Every contribution is a version."""

    def committed(self, version: int, num_contributions: int, missing: Sequence[int]) -> str | None:
        if num_contributions == 1:
            return None
        return f"version {version} holds {num_contributions} contributions; in {self.start['mode']} each is a version"


class BufferRule(Rule):
    """A version is made of no more contributions than the buffer takes, where its size was said."""

    def committed(self, version: int, num_contributions: int, missing: Sequence[int]) -> str | None:
        size = self.options.get("buffer")
        if size is None or num_contributions <= size:
            return None
        return f"version {version} holds {num_contributions} contributions; the buffer takes {size}"


class CutRule(Rule):
    """Nothing counts that is as late as `late_cut`, or later."""

    def counted(self, rank: int, number: int, base_version: int, version: int) -> str | None:
        late, cut = version - base_version, self.options.get("late_cut")
        if cut is None or late < cut:
            return None
        return f"rank {rank} contribution {number} is {late} versions late, and counts: late_cut is {cut}"


class LeadRule(Rule):
    """Nobody goes on further ahead of the slowest than the bound (`staleness` in the start line)."""

    def replied(self, rank: int, lead: int) -> str | None:
        bound = self.start.get("staleness")
        if bound is None or lead <= bound:
            return None
        return f"rank {rank} may go on {lead} contributions ahead of the slowest: at most {bound} are allowed"
