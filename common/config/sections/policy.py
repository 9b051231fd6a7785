"""The section `policy`: what holds for every mode, and the options that the modes declare."""

# No `from __future__ import annotations`: see __init__.py.
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ...errors import UsageError
from ...registry import AGGREGATIONS, MODES, mode_anywhere
from ...user_code import is_in_file
from ..option import Flag, Section


class PolicyConfig(Section):
    """How contributions are synchronised: what holds for every mode, and beside it whatever options the modes
    declare. A mode reads those it knows and ignores the others, so that several are compared with one file."""

    model_config = ConfigDict(extra="allow", frozen=True)

    delayed_update: Annotated[bool, Flag()] = Field(
        False,
        description="async, ssp, localsgd, diloco, async_diloco: workers compute the next step during the exchange",
    )
    min_workers: int = Field(1, ge=1, description="training holds until this many workers are live")
    weighting: Literal["samples", "equal"] = Field("samples", description="weight of a worker in a mean")
    aggregation: Annotated[str, AfterValidator(AGGREGATIONS.check)] = Field(
        "mean", description="sync, diloco: how contributions of a round become one: mean, median or trimmed_mean"
    )
    trim: int = Field(1, ge=1, description="trimmed_mean: values left out at each end, of every element")

    def options(self, mode: str) -> Any:
        """The options of a mode, an instance of its policy's `Options`: as set, or their defaults."""
        kind = MODES.load(mode).Options
        extra = self.model_extra or {}
        return kind(**{name: extra[name] for name in kind.model_fields if name in extra})

    def option(self, name: str, default: Any = None) -> Any:
        """The value that an option of any mode was set to; `default` where it was not."""
        return (self.model_extra or {}).get(name, default)


def mode_options(modes: Iterable[str] = ()) -> dict[str, type[BaseModel]]:
    """What each mode declares, `modes` first: the class of its options. UsageError for one that does not go."""
    found = {mode: MODES.load(mode).Options for mode in dict.fromkeys([*modes, *MODES.names()])}
    for mode, options in found.items():
        for name, info in options.model_fields.items():
            if name in PolicyConfig.model_fields:
                raise UsageError(f"mode {mode}: its option {name} is a setting of every mode", fix="name it otherwise")
            if info.is_required():
                raise UsageError(f"mode {mode}: its option {name} has no default", fix="give it one: Field(1, ...)")
    return found


def own_modes(modes: Iterable[str], run: Mapping[str, Any]) -> dict[str, Any]:
    """Another process's section `run`, with the path on this machine of each mode that is in a file.

    `modes`: the modes that this process was given. Raises UsageError for a mode in a file that is not among them:
    no other process says which code this one runs.
    """
    mine = {mode_anywhere(mode): mode for mode in modes if is_in_file(mode)}

    def absolute(mode: str) -> str:
        name = mode_anywhere(mode)
        if is_in_file(mode) and name not in mine:
            raise UsageError(
                f"the run's mode is {mode}, which this process was not given: a file is never taken from another",
                fix=f"--mode {name} on its own command line",
            )
        return mine[name] if is_in_file(mode) else mode

    others = tuple(absolute(str(mode)) for mode in run.get("other_modes", ()))
    return {**run, "mode": absolute(str(run["mode"])), "other_modes": others}


def checked_options(values: Mapping[str, Any], modes: Iterable[str]) -> dict[str, Any]:
    """The options as the modes' classes take them: each as the first of `modes` that declares it says, else as any
    other that does. Raises ValidationError, and ValueError for one that no mode has."""
    checked: dict[str, Any] = {}
    for kind in mode_options(modes).values():
        chosen = {name: values[name] for name in kind.model_fields if name in values and name not in checked}
        options = kind.model_validate(chosen)
        checked |= {name: getattr(options, name) for name in chosen}
    unknown = ", ".join(sorted(values.keys() - checked.keys()))
    if unknown:
        raise ValueError(f"no mode has the option {unknown}")
    return checked
