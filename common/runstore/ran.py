"""What ran: the one record of a run's settings, for the run store, the dashboard, trackers and reports.

The server's configuration describes the server and its mode. A worker describes the rest with its first contribution,
in the sections of `OF_WORKERS`: the script with its arguments and commit or the task, the batch size, and what the
script gave to `session.config`. Its model has the optimizer. Before that all of it is unknown, never a default of the
configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.schema import Config
from ..wire.json_text import read_json

if TYPE_CHECKING:
    from ..tensors.optimizers import OptimizerSpec

Settings = dict[str, dict[str, Any]]  # values by section and name

# Sections of the server's configuration that do not say what workers run, or that are no settings of the run.
_LEFT_OUT = {"security", "task", "optimizer", "train", "loader", "worker", "slowdown", "launch", "serve", "log"}
_LONGEST = 100  # characters of a name that a worker gives
OF_WORKERS = ("script", "task", "run", "launch", "worker", "loader", "slowdown", "config")


@dataclass(frozen=True)
class Ran:
    """What ran, as far as it is known. `work`: the script or the task as a phrase, empty: unknown."""

    work: str = ""
    settings: Settings = field(default_factory=dict)


def what_ran(
    config: Config, mode: str, policy: Mapping[str, Any], optimizer: OptimizerSpec | None, work: Settings
) -> Ran:
    """Returns what ran, with the settings by section.

    `policy`: the options of the mode, with values for its defaults. `optimizer`: None if it is unknown. Where its
    groups differ, a hyperparameter is a list of values. `work`: what workers say, empty before their first word.
    """
    found: Settings = config.model_dump(mode="json", exclude=_LEFT_OUT)
    found["policy"] = {name: getattr(config.policy, name) for name in type(config.policy).model_fields} | dict(policy)
    found["run"] |= {"mode": mode, "batch_size": None}
    del found["run"]["other_modes"]
    found["launch"] = {"serve": config.launch.serve}
    if "task" in work:
        found["train"] = config.train.model_dump(mode="json")
    if optimizer is not None:
        groups = [group.hyperparameters for group in optimizer.groups]
        values = {key: [group.get(key) for group in groups] for key in chain(*groups)}
        same = {key: of[0] if of.count(of[0]) == len(of) else of for key, of in values.items()}
        found["optimizer"] = {"name": optimizer.name} | same
    for section, values in work.items():
        found[section] = {**found.get(section, {}), **values}
    path, task = work.get("script", {}).get("path"), str(work.get("task", {}).get("name", ""))
    return Ran(f"script {Path(str(path)).name[:_LONGEST]}" if path else task[:_LONGEST], found)


def read_work(text: str) -> Settings:
    """Returns what a worker says, without sections that are not its own. Malformed text says nothing."""
    try:
        found = read_json(text) if text else {}
    except ValueError:
        return {}
    sections = found.items() if isinstance(found, dict) else ()
    return {name: values for name, values in sections if name in OF_WORKERS and isinstance(values, dict)}
