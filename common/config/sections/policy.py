"""The section `policy`: settings of every mode, and the options that single modes declare."""

# No `from __future__ import annotations`: see __init__.py.
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ...errors import UsageError
from ...registry import AGGREGATIONS, MODES, mode_anywhere
from ...user_code import is_in_file
from ..option import Flag, Section


class PolicyConfig(Section):
    """Settings of synchronisation: fields for every mode, and the options that single modes declare.

    A mode reads its own options and ignores those of other modes, so that one file can serve a comparison of modes.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    delayed_update: Annotated[bool, Flag()] = Field(
        False,
        description="async, ssp, localsgd, diloco, async_diloco: workers compute the next step during the exchange",
    )
    min_workers: int = Field(1, ge=1, description="training waits until this many workers are live")
    weighting: Literal["samples", "equal"] = Field("samples", description="weight of a worker in a mean")
    aggregation: Annotated[str, AfterValidator(AGGREGATIONS.check)] = Field(
        "mean", description="sync, diloco: aggregation of a round's contributions: mean, median or trimmed_mean"
    )
    trim: int = Field(1, ge=1, description="trimmed_mean: values to leave out at each end, for every element")

    def options(self, mode: str) -> Any:
        """Return the options of a mode, an instance of its policy's `Options`, with defaults for those not set."""
        kind = MODES.load(mode).Options
        extra = self.model_extra or {}
        return kind(**{name: extra[name] for name in kind.model_fields if name in extra})

    def option(self, name: str, default: Any = None) -> Any:
        """Return the value that was set for an option of any mode, or `default`."""
        return (self.model_extra or {}).get(name, default)


def mode_options(modes: Iterable[str] = ()) -> dict[str, type[BaseModel]]:
    """Return the class of options of each mode, with `modes` first.

    Raises UsageError for an option without a default, or with the name of a setting of every mode.
    """
    found = {mode: MODES.load(mode).Options for mode in dict.fromkeys([*modes, *MODES.names()])}
    for mode, options in found.items():
        for name, info in options.model_fields.items():
            if name in PolicyConfig.model_fields:
                raise UsageError(f"mode {mode}: its option {name} is a setting of every mode", fix="name it otherwise")
            if info.is_required():
                raise UsageError(f"mode {mode}: its option {name} has no default", fix="give it one: Field(1, ...)")
    return found


def own_modes(modes: Iterable[str], run: Mapping[str, Any]) -> dict[str, Any]:
    """Return another process's section `run`, with this machine's path for each mode in a file.

    `modes` are the modes from this process's own settings. Raises UsageError for a mode in a file that is not among
    them, because another process must not choose which code this process runs.
    """
    mine = {mode_anywhere(mode): mode for mode in modes if is_in_file(mode)}

    def absolute(mode: str) -> str:
        name = mode_anywhere(mode)
        if is_in_file(mode) and name not in mine:
            message = f"the run's mode is {mode}, a file that this process's own settings do not name"
            fix = f"add --mode {name} to its command line: a server never chooses a file for other processes"
            raise UsageError(message, fix=fix)
        return mine[name] if is_in_file(mode) else mode

    others = tuple(absolute(str(mode)) for mode in run.get("other_modes", ()))
    return {**run, "mode": absolute(str(run["mode"])), "other_modes": others}


def checked_options(values: Mapping[str, Any], modes: Iterable[str]) -> dict[str, Any]:
    """Return the options as validated by the modes' classes.

    If several modes declare an option, the first in `modes` validates it. Raises ValidationError, and ValueError for an
    option that no mode has.
    """
    checked: dict[str, Any] = {}
    for kind in mode_options(modes).values():
        chosen = {name: values[name] for name in kind.model_fields if name in values and name not in checked}
        options = kind.model_validate(chosen)
        checked |= {name: getattr(options, name) for name in chosen}
    if unknown := ", ".join(sorted(values.keys() - checked.keys())):
        raise ValueError(f"no mode has the option {unknown}")
    return checked
