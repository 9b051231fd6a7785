"""Every setting by its dotted key, and the flag that a program has for some of them: read from the schema."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .option import Flag, Panel
from .schema import Config, PolicyConfig, mode_options


def sections() -> dict[str, type[BaseModel]]:
    """The sections of the configuration by their names."""
    return {name: info.annotation for name, info in Config.model_fields.items()}  # type: ignore[misc]


def settings(modes: Iterable[str] = ()) -> dict[str, FieldInfo]:
    """Every key with its field; in `policy` also the options that modes declare, `modes` before all others."""
    found: dict[str, FieldInfo] = {}
    for section, model in sections().items():
        found |= {f"{section}.{name}": info for name, info in model.model_fields.items()}
        if model is PolicyConfig:
            for options in mode_options(modes).values():
                for name, info in options.model_fields.items():
                    found.setdefault(f"{section}.{name}", info)
    return found


def flag_of(key: str, info: FieldInfo) -> Flag | None:
    """The flag of a field: what its `Annotated` says; an option of a mode has one anyway."""
    section, _, name = key.partition(".")
    is_option = sections()[section] is PolicyConfig and name not in PolicyConfig.model_fields
    return next((entry for entry in info.metadata if isinstance(entry, Flag)), Flag() if is_option else None)


def flag_name(key: str, info: FieldInfo) -> str:
    """`--local-steps` for `policy.local_steps`, `--task` for `task.name`, or what its field says."""
    flag = flag_of(key, info)
    section, _, last = key.rpartition(".")
    return f"--{(flag and flag.name) or (section if last == 'name' else last.replace('_', '-'))}"


def flags_of(program: str, modes: Iterable[str] = ()) -> dict[str, tuple[FieldInfo, Flag]]:
    """The keys that are flags of a program, in the order of their groups. Of two with one name the first has it."""
    found: dict[str, tuple[FieldInfo, Flag]] = {}
    taken = set()
    for key, info in settings(modes).items():
        flag = flag_of(key, info)
        if flag is not None and program in flag.programs and flag_name(key, info) not in taken:
            taken.add(flag_name(key, info))
            found[key] = (info, flag)
    order = list(Panel)
    return dict(sorted(found.items(), key=lambda item: order.index(item[1][1].panel)))
