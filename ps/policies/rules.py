"""Rules that a mode adds for the history of a run, beyond those of every mode. Pure.

`ps-launch check` makes a mode's rules from the `start` line of the history (mode, options), and passes them the lines
that follow. For a mode in a file its user names the file (--mode). Your own rule is a subclass, named in
`Policy.rules`. Each method returns a sentence where the rule is broken, else None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Rule:
    """One rule. `start` has the fields of the history's start line, and `options` the mode's options in that run."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        self.start = start
        self.options: Mapping[str, Any] = start["options"]

    def changed(self, name: str, value: Any) -> None:
        """Take the new value of an option that was set during the run."""
        self.options = {**self.options, name: value}
        if name in self.start:  # `staleness`, as the bound of a lead
            self.start = {**self.start, name: value}

    def counted(self, rank: int, number: int, base_version: int, version: int) -> str | None:
        """Check a contribution that counts, computed on `base_version`, while the newest version is `version`."""
        return None

    def committed(self, version: int, num_contributions: int, missing: Sequence[int]) -> str | None:
        """Check a version made of so many contributions, without the live ranks in `missing`."""
        return None

    def replied(self, rank: int, lead: int) -> str | None:
        """Check a reply to a rank that is `lead` training steps ahead of the slowest live one."""
        return None


class RoundRule(Rule):
    """A version is one contribution of every live worker, or group member, unless rounds may close without some."""

    def counted(self, rank: int, number: int, base_version: int, version: int) -> str | None:
        bound = int(self.options.get("staleness", 0))  # of allreduce: means that may be outstanding
        if base_version <= version <= base_version + bound:
            return None
        message = f"rank {rank} contribution {number} has base version {base_version} and is accepted"
        if not bound:
            return f"{message} in the round after version {version}"
        return f"{message} at {version}: at most {bound} may lie between"

    def committed(self, version: int, num_contributions: int, missing: Sequence[int]) -> str | None:
        may_lack = any(self.options.get(name) for name in ("straggler_timeout_s", "straggler_mad", "backup_workers"))
        if not missing or may_lack:
            return None
        return f"version {version} was made without the live rank {', '.join(map(str, missing))}"


class SingleRule(Rule):
    """Every contribution is a version."""

    def committed(self, version: int, num_contributions: int, missing: Sequence[int]) -> str | None:
        if num_contributions == 1:
            return None
        return f"version {version} holds {num_contributions} contributions; in {self.start['mode']} each is a version"


class BufferRule(Rule):
    """A version has at most as many contributions as the buffer takes, if its size is configured."""

    def committed(self, version: int, num_contributions: int, missing: Sequence[int]) -> str | None:
        size = self.options.get("buffer")
        if size is None or num_contributions <= size:
            return None
        return f"version {version} holds {num_contributions} contributions; the buffer takes {size}"


class CutRule(Rule):
    """No contribution counts that is `late_cut` versions late, or more."""

    def counted(self, rank: int, number: int, base_version: int, version: int) -> str | None:
        late, cut = version - base_version, self.options.get("late_cut")
        if cut is None or late < cut:
            return None
        return f"rank {rank} contribution {number} is {late} versions late, and counts: late_cut is {cut}"


class LeadRule(Rule):
    """No worker continues further ahead of the slowest than the bound (`staleness` in the start line)."""

    def replied(self, rank: int, lead: int) -> str | None:
        bound = self.start.get("staleness")
        if bound is None or lead <= bound:
            return None
        return f"rank {rank} may go on {lead} contributions ahead of the slowest: at most {bound} are allowed"
