"""A mode in a file of your own, with options, a rule for `ps-launch check`, and state in snapshots.

    ps-launch --mode examples/cooling.py:Cooling --cooling 0.95 --history h.jsonl
    ps-launch check --mode examples/cooling.py:Cooling h.jsonl

As async, with a learning rate that falls with every contribution; docs/architecture.md says how to add a mode.
"""

from pydantic import Field

from paramserver.common.config.option import Section
from paramserver.ps.policies.base import Discard, Outcome
from paramserver.ps.policies.rules import Rule, SingleRule
from paramserver.ps.policies.single import SinglePolicy


class AgeRule(Rule):
    def counted(self, rank, number, base_version, version):
        age, most = version - base_version, self.options["max_age"]
        return f"rank {rank} contribution {number} is {age} versions old, over {most}" if age > most else None


class CoolingOptions(Section):
    cooling: float = Field(0.99, gt=0, le=1, description="factor of the rate, applied at each contribution")
    max_age: int = Field(20, ge=0, description="versions that a contribution may be behind; older ones are dropped")


class Cooling(SinglePolicy):
    """As async, with a rate that falls with every contribution. Contributions that are too old are dropped."""

    Options, rules, may_scale = CoolingOptions, (SingleRule, AgeRule), True
    scale = 1.0

    def _take(self, member, contribution, now):
        if self.staleness(member.rank, contribution) > self.options.max_age:
            self._owe(member, Outcome.DROPPED)
            return [Discard(member.rank)]
        return super()._take(member, contribution, now)

    def _commit(self, ranks, reason, lr_scale=1.0):
        scale, self.scale = self.scale, self.scale * self.options.cooling
        return super()._commit(ranks, reason, scale)

    def saved_state(self):
        return {"scale": self.scale}

    def restore(self, version, rows, state):
        super().restore(version, rows, state)
        self.scale = state.get("scale", 1.0)  # absent in a snapshot of another mode
