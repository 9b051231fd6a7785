"""Plans of the launcher as values: the settings that go in, and those that its processes get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paramserver.common.config.schema import Config
from paramserver.common.config.sources import Resolved, load_config
from paramserver.launch.plan.hosts import Host, load_hosts
from paramserver.launch.plan.runs import Machine, Plan, Request, plan_runs

MACHINE = Machine(python="python")


def resolve(*sets: str, path: str | None = None, **flags: Any) -> Resolved:
    """Four workers; `__` stands for the dot in the key of a flag."""
    dotted = {key.replace("__", "."): value for key, value in flags.items()}
    return load_config(path, {"run.workers": 4, **dotted}, list(sets), {})


def plan_of(resolved: Resolved, mode: str = "", machine: Machine = MACHINE, **request: Any) -> Plan:
    return plan_runs(resolved, Request(modes=(mode or resolved.config.run.mode,), **request), machine)[0]


def sets_of(argv: tuple[str, ...]) -> list[str]:
    return [argv[index + 1] for index, word in enumerate(argv) if word == "--set"]


def settings_of(argv: tuple[str, ...], **environ: str) -> Config:
    """What a process reads of its own command line."""
    return load_config(None, {}, sets_of(argv), environ).config


def hosts_of(folder: Path, text: str) -> tuple[Host, ...]:
    (folder / "hosts.yaml").write_text(text)
    return load_hosts(str(folder / "hosts.yaml"))
