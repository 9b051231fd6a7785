"""What the configuration and the options of a mode are made of: a section of settings, and their flags.

    class Options(Section):
        staleness: int = Field(3, ge=0, description="how far ahead of the slowest a worker may begin")
        pull_every: Annotated[int, Flag(metavar="N")] = Field(1, ge=1, description="fetch weights every Nth time")

In the configuration a field is a flag where its `Annotated` says so. An option of a mode always is, of
ps-server and ps-launch: `--staleness`, `--pull-every`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

# The programs that have flags.
SERVER, WORKER, LAUNCHER = EVERY = ("ps-server", "ps-worker", "ps-launch")


NOT_FINITE = "finite_number"  # pydantic's name of this mistake


class Panel(StrEnum):
    """The groups of --help, in their order."""

    RUN = "Run"
    MODE = "Synchronisation"
    OPTIMIZER = "Optimizer"
    SNAPSHOTS = "Snapshots and restarts"
    OUTPUT = "Output"
    SECURITY = "Security"
    HOSTS = "Shards and hosts"
    OTHER = "Other"


class Section(BaseModel):
    """Keyword-only, immutable, unknown keys refused. What it is like is found out when it is first used."""

    # Infinity means "never" or "no limit" nowhere: None does. A field that takes it says so: Field(allow_inf_nan=True).
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`steps: yes` is a mistake, not one step."""
        if isinstance(value, bool) and info.field_name is not None:
            annotation = cls.model_fields[info.field_name].annotation
            if bool not in (annotation, *get_args(annotation)):
                raise ValueError(f"is no switch, got {value}")
        return value


@dataclass(frozen=True)
class Flag:
    """The flag of a field, in its `Annotated`; the field's description is its help."""

    panel: Panel = Panel.MODE
    programs: tuple[str, ...] = (SERVER, LAUNCHER)
    name: str = ""  # "lr"; "": the key's last part, of `task.name` the first
    short: str = ""  # "n", a second name of one letter
    metavar: str = ""
    is_for_alone: bool = False  # ps-worker takes it without a server only
