"""From the configuration to the state machine of its mode."""

from __future__ import annotations

from ...common.config.schema import Config
from ...common.registry import MODES, check_contributions, check_pipelined
from ..policies.base import Options, Policy


def make_policy(config: Config) -> Policy:
    """The mode's state machine with the options of the configuration."""
    policy = config.policy
    if policy.pipelined:
        check_pipelined(config.run.mode, policy.staleness)
    check_contributions(config.run.mode, policy.aggregation, config.store.max_norm)
    options = Options(
        steps=config.run.steps,
        num_workers=config.run.workers,
        min_workers=policy.min_workers,
        staleness=policy.staleness,
        local_steps=policy.local_steps,
        straggler_timeout_s=policy.straggler_timeout_s,
        backup_workers=policy.backup_workers,
        weighting=policy.weighting,
        pipelined=policy.pipelined,
        extra=policy.extra,
    )
    made: Policy = MODES.load(config.run.mode)(options)
    return made
