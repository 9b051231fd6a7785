"""Base classes of the configuration and of a mode's options: a section of settings, and the flag of a setting.

    class Options(Section):
        staleness: int = Field(3, ge=0, description="how far ahead of the slowest a worker may begin")
        pull_every: Annotated[int, Flag(metavar="N")] = Field(1, ge=1, description="fetch weights every Nth time")

A field of the configuration is a flag if its `Annotated` contains a `Flag`. An option of a mode is always a flag of
ps-server and ps-launch: `--staleness`, `--pull-every`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator

from .plain import for_field

# The programs that have flags.
SERVER, WORKER, LAUNCHER = EVERY = ("ps-server", "ps-worker", "ps-launch")
SERVE = "ps-serve"


NOT_FINITE = "finite_number"  # pydantic's name of this error


class Panel(StrEnum):
    """The headings of --help, in their order."""

    RUN = "Run"
    MODE = "Synchronisation"
    OPTIMIZER = "Optimizer"
    SNAPSHOTS = "Snapshots and restarts"
    OUTPUT = "Output"
    SECURITY = "Security"
    HOSTS = "Shards and hosts"
    OTHER = "Other"


class Section(BaseModel):
    """A section of settings: keyword-only and immutable, and it refuses unknown keys.

    Pydantic builds its validator at the first use, which keeps the start of a program short.
    """

    # None means "never" or "no limit". A field that also accepts infinity needs Field(allow_inf_nan=True).
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_wanted(cls, value: Any, info: ValidationInfo) -> Any:
        """Read text of a source by the field's type, and refuse a switch for a number and the like."""
        annotation = cls.model_fields[info.field_name].annotation if info.field_name is not None else Any
        is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
        return value if is_section else for_field(value, annotation)


def checked_by(read: Callable[[str], object]) -> AfterValidator:
    """Return a validator for text that `read` accepts. `read` raises ValueError for other text."""

    def check(text: str) -> str:
        read(text)
        return text

    return AfterValidator(check)


@dataclass(frozen=True)
class Flag:
    """The flag of a field, in its `Annotated`. The field's description is the help text."""

    panel: Panel = Panel.MODE
    programs: tuple[str, ...] = (SERVER, LAUNCHER)
    name: str = ""  # such as "lr"; "": the last part of the key, or the section for a key that ends in `.name`
    short: str = ""  # a second name of one letter, such as "n"
    metavar: str = ""
    is_for_alone: bool = False  # ps-worker accepts it only without a server
