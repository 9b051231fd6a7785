"""Reads from the schema every setting by its dotted key, and the flags of each program."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .option import Flag, Panel
from .schema import Config, PolicyConfig, mode_options


def sections() -> dict[str, type[BaseModel]]:
    """Return the sections of the configuration by name."""
    return {name: info.annotation for name, info in Config.model_fields.items()}  # type: ignore[misc]


def settings(modes: Iterable[str] = ()) -> dict[str, FieldInfo]:
    """Return every dotted key with its field, including the options that modes declare.

    If two modes declare an option of the same name, a mode in `modes` comes before the others.
    """
    found: dict[str, FieldInfo] = {}
    for section, model in sections().items():
        found |= {f"{section}.{name}": info for name, info in model.model_fields.items()}
        if model is PolicyConfig:
            for options in mode_options(modes).values():
                for name, info in options.model_fields.items():
                    found.setdefault(f"{section}.{name}", info)
    return found


def flag_of(key: str, info: FieldInfo) -> Flag | None:
    """Return the flag in the field's `Annotated`. An option of a mode always has a flag."""
    section, _, name = key.partition(".")
    is_option = sections()[section] is PolicyConfig and name not in PolicyConfig.model_fields
    return next((entry for entry in info.metadata if isinstance(entry, Flag)), Flag() if is_option else None)


def flag_name(key: str, info: FieldInfo) -> str:
    """Return `--local-steps` for `policy.local_steps`, `--task` for `task.name`, or the name that the field gives."""
    flag = flag_of(key, info)
    section, _, last = key.rpartition(".")
    return f"--{(flag and flag.name) or (section if last == 'name' else last.replace('_', '-'))}"


def flags_of(program: str, modes: Iterable[str] = ()) -> dict[str, tuple[FieldInfo, Flag]]:
    """Return the keys that are flags of a program, in the order of their panels.

    If two keys have the same flag name, the first key gets the flag.
    """
    found: dict[str, tuple[FieldInfo, Flag]] = {}
    taken = set()
    for key, info in settings(modes).items():
        flag = flag_of(key, info)
        if flag is not None and program in flag.programs and flag_name(key, info) not in taken:
            taken.add(flag_name(key, info))
            found[key] = (info, flag)
    order = list(Panel)
    return dict(sorted(found.items(), key=lambda item: order.index(item[1][1].panel)))
