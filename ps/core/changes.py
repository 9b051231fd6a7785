"""Options and modes that change during a run.

Snapshots keep the changed values. A server drops one when its configuration has a new value of the same option."""

from __future__ import annotations

import contextlib
from typing import Any

from pydantic import ValidationError

from ...common.errors import ParamServerError
from ...common.registry import MODES
from ..policies.base import Policy
from .state import RunState

LR_SCALE, MODE = "lr_scale", "mode"
MOST_LR_SCALE = 1e6


class CannotError(Exception):
    """A control cannot be carried out; the message is the reason, as a sentence."""


def compatible_modes(run: RunState) -> list[str]:
    """Modes that may take over from this run's."""
    group = run.policy.compatible_modes
    if run.options.policy_of is None or not group:
        return []
    return [name for name in MODES.names() if name != run.mode and MODES.load(name).compatible_modes == group]


def policy_of(run: RunState, mode: Any) -> Policy:
    policy, make = run.policy, run.options.policy_of
    if mode not in (known := compatible_modes(run)) or make is None:
        raise CannotError(
            f"{run.mode} cannot become {mode!r:.40} while workers train; it can become: {', '.join(known)}. "
            "Any other mode continues from a snapshot: ps-server --resume latest --mode"
        )
    if policy.pull_every > 1:
        raise CannotError(f"policy.pull_every is {policy.pull_every}: workers know weights too rarely for another mode")
    try:
        made = make(mode)
    except ParamServerError as error:
        raise CannotError(f"{run.mode} cannot become {mode}: {error.message}") from None
    apply_changed(run, made)
    return made


def apply_changed(run: RunState, policy: Policy) -> None:
    """Apply options that were set during the run to `policy` too, unless its configuration has a new value."""
    now = policy.options.model_dump(mode="json")
    changed = {
        name: value for name, (configured, value) in run.changed.items()
        if name in policy.changeable and now.get(name) == configured
    }  # fmt: skip
    if changed:
        policy.change(validated(policy, changed), 0.0)


def validated(policy: Policy, values: dict[str, Any]) -> Any:
    """The options of `policy` with other values."""
    try:
        return type(policy.options).model_validate({**policy.options.model_dump(), **values})
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ").removeprefix("Input ")
        refused = ", ".join(f"{name} cannot be {value!r:.40}" for name, value in values.items())
        raise CannotError(f"{refused}: it {why}") from None


# ---- in snapshots -----------------------------------------------------------------------------------


def saved(run: RunState) -> dict[str, Any]:
    """Returns JSON. `changed` has, by name, the configured value and the value set during the run."""
    changed = {name: list(values) for name, values in run.changed.items()}
    mode = {} if run.mode == run.options.mode else {MODE: [run.options.mode, run.mode]}
    return {LR_SCALE: run.contributions.lr_scale, "changed": changed, "evicted": sorted(run.roster.evicted), **mode}


def restore(run: RunState, kept: Any) -> None:
    """Restore what `saved` returned; absent and malformed values are dropped."""
    if not isinstance(kept, dict):
        return
    scale, changed = kept.get(LR_SCALE), kept.get("changed")
    if isinstance(scale, int | float) and 0 <= scale <= MOST_LR_SCALE:
        run.contributions.lr_scale = float(scale)
    for name, pair in changed.items() if isinstance(changed, dict) else ():
        if isinstance(pair, list) and len(pair) == 2:
            run.changed[name] = pair[0], pair[1]
    with contextlib.suppress(CannotError):
        match kept.get(MODE):
            case [run.mode, mode]:
                policy = policy_of(run, mode)
                policy.take_over(run.policy, 0.0)  # before any event it decides nothing
                run.use_policy(mode, policy)
            case _:
                apply_changed(run, run.policy)
