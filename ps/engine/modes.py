"""Makes a run's options and the state machine of its mode from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ...common.combinations import check, check_values, choices_of
from ...common.config.schema import Config
from ...common.registry import CODECS, MODES
from ..core.state import Options
from ..policies.base import Common, Policy


def make_policy(config: Config) -> Policy:
    """The mode's state machine with the options of the configuration."""
    policy, run = config.policy, config.run
    options = policy.options(run.mode)
    check(choices_of(config, run.mode))
    check_values(config, run.mode)
    settings = {name: getattr(policy, name) for name in type(policy).model_fields}
    settings |= {"training_steps": run.steps, "num_workers": run.workers}
    settings["rounds"] = {config.worker.codec, config.worker.reply_codec} != {"raw"}
    # A codec is loaded only where one is used, so that a simulation of raw payloads needs no torch.
    settings["keeps_most"] = settings["rounds"] and not CODECS.load(config.worker.codec)().suits_outer_momentum
    settings["max_staged"] = config.server.max_staged if config.server.shards == 1 else None  # `make_room`
    return policy_of(run.mode, {**settings, **options.model_dump()})


def policy_of(mode: str, settings: Mapping[str, Any]) -> Policy:
    """Returns the mode's state machine, with the settings that are fields of `Common` or of its options."""
    kind: type[Policy] = MODES.load(mode)
    common = Common(**{field.name: settings[field.name] for field in fields(Common) if field.name in settings})
    options = {name: settings[name] for name in kind.Options.model_fields if name in settings}
    return kind(common, kind.Options(**options))


def options_of(config: Config) -> Options:
    """Returns the run's options from the configuration."""
    return Options(
        mode=config.run.mode,
        num_workers=config.run.workers,
        max_workers=config.limits.workers,
        lease_s=config.server.lease_s,
        absent_s=config.server.absent_s,
        max_rejected=config.store.max_nonfinite,
        keeps_snapshots=config.checkpoint.dir is not None,
        epochs=config.run.epochs,
        best=config.run.best,
        keeps_best=config.output.best is not None,
        stop_when=config.run.stop_when,
        patience=config.run.patience,
        every_steps=config.checkpoint.every_steps,
        every_s=config.checkpoint.every_s,
    )
