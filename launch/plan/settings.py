"""Settings on their way from the launcher to its processes: as arguments and as variables. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...common.config.documents import scalar_text
from ...common.config.schema import DEFAULT_ADDRESS, Config
from ...common.config.sources import Resolved
from ...common.errors import UsageError
from ...common.user_code import is_in_file
from .files import is_flag
from .placement import Place

DEFAULT_HOST = DEFAULT_ADDRESS.rpartition(":")[0]
# The launcher's own affairs. Children log JSON, and at least the events that the launcher lives by.
_NOT_PASSED_ON = ("launch.", "log.")
# Each server of a job has its own, given by the launcher.
_ONE_SERVERS = ("server.shard", "server.coordinator", "server.advertise")


def told_settings(resolved: Resolved, *, with_files: bool) -> dict[str, Any]:
    """The values of flags and --set, by dotted key, as validated; `with_files` those of CONFIG as well.

    What comes from a PS_ variable is not among them: children inherit those.
    """
    return {
        key: value_of(resolved.config, key)
        for key, origin in resolved.origins.items()
        if (is_flag(origin) or (with_files and not origin.startswith("environment ")))
        and not key.startswith(_NOT_PASSED_ON)
    }


def check_one_for_all(resolved: Resolved) -> None:
    """Refuse for a whole job what each server of it must be told by itself. Raises UsageError."""
    for key in _ONE_SERVERS:
        if resolved.was_set(key):
            raise UsageError(
                f"{resolved.origins[key]}: {key} belongs to one server, and this job has all of them",
                fix="leave it out; --shards S says how many there are, ps-launch numbers them",
            )


def single_settings(config: Config, num_workers: int) -> dict[str, Any]:
    """The settings that turn a run of N workers into one worker on the union batch."""
    settings: dict[str, Any] = {"run.workers": 1, "run.batch_size": config.run.batch_size * num_workers}
    if config.policy.min_workers > 1:  # these would contradict run.workers=1
        settings["policy.min_workers"] = 1
    if config.policy.option("backup_workers"):
        settings["policy.backup_workers"] = 0
    return settings


def for_workers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings that workers are given: without a mode in a file, which is the server's business, and
    which may not be where a worker is."""
    if not any(is_in_file(str(settings.get(key))) for key in ("run.mode", "run.other_modes")):
        return dict(settings)
    return {key: value for key, value in settings.items() if not key.startswith(("run.mode", "run.other_", "policy."))}


def listen_host(resolved: Resolved, first: Place | None, *, spans_hosts: bool) -> str:
    """Where servers listen: a server.listen that someone set, else where the first is placed, else the default."""
    host = resolved.config.server.listen.rpartition(":")[0]
    if not resolved.was_set("server.listen"):
        if first is not None:
            return first.listen
        if spans_hosts:
            return "0.0.0.0"
    return host or DEFAULT_HOST


def arguments(config_path: str | None, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """`--config FILE --set key=value ...`."""
    words = ["--config", config_path] if config_path else []
    for key, value in settings.items():
        words += ["--set", f"{key}={scalar_text(value)}"]
    return tuple(words)


def variable(key: str) -> str:
    """The variable that says the same as --set."""
    return f"PS_{key.upper().replace('.', '__')}"


def value_of(config: Config, key: str) -> Any:
    """The value at a dotted key, also within a dict."""
    value: Any = config
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value
