"""Every setting by its dotted key, and the flag that a program has for some of them: read from the schema."""

from __future__ import annotations

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .option import Flag, Panel
from .schema import Config


def sections() -> dict[str, type[BaseModel]]:
    """The sections of the configuration by their names."""
    return {name: info.annotation for name, info in Config.model_fields.items()}  # type: ignore[misc]


def settings() -> dict[str, FieldInfo]:
    """Every key with its field."""
    return {
        f"{section}.{name}": info for section, model in sections().items() for name, info in model.model_fields.items()
    }


def flag_of(info: FieldInfo) -> Flag | None:
    """The flag of a field; None where it has none."""
    return next((entry for entry in info.metadata if isinstance(entry, Flag)), None)


def flag_name(key: str, info: FieldInfo) -> str:
    """`--local-steps` for `policy.local_steps`, `--task` for `task.name`, or what its field says."""
    flag = flag_of(info)
    section, _, last = key.rpartition(".")
    return f"--{(flag and flag.name) or (section if last == 'name' else last.replace('_', '-'))}"


def flags_of(program: str) -> dict[str, tuple[FieldInfo, Flag]]:
    """The keys that are flags of a program, in the order of their groups."""
    found = {
        key: (info, flag)
        for key, info in settings().items()
        if (flag := flag_of(info)) is not None and program in flag.programs
    }
    order = list(Panel)
    return dict(sorted(found.items(), key=lambda item: order.index(item[1][1].panel)))
