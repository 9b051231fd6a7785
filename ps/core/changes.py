"""Options that change during a run.

Snapshots keep the changed values. A server drops one when its configuration has a new value of the same option."""

from __future__ import annotations

import contextlib
from typing import Any

from pydantic import ValidationError

from ..policies.base import Policy
from .state import RunState

LR_SCALE = "lr_scale"
MOST_LR_SCALE = 1e6


class CannotError(Exception):
    """A control cannot be carried out; the message is the reason, as a sentence."""


def apply_changed(run: RunState, policy: Policy) -> None:
    """Apply options that were set during the run to `policy` too. Drop those whose configuration has a new value."""
    now, changed = policy.options.model_dump(mode="json"), {}
    for name in run.changed.keys() & policy.changeable:
        configured, value = run.changed[name]
        if now.get(name) == configured:
            changed[name] = value
        else:
            del run.changed[name]
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
    return {LR_SCALE: run.contributions.lr_scale, "changed": changed, "evicted": sorted(run.roster.evicted)}


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
        apply_changed(run, run.policy)
