"""Settings on their way from the launcher to its processes: what each is told, and which files are whose. Pure.

Where several modes run, each has its own weights, history and snapshots. Of the certificates, the
configured one is the server's. Workers have none, or with mutual TLS those that `ps-certs init` has
put beside it: `rank-N.crt`, or `worker.crt` for all; each of several shards then has `shard-N.crt`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from ...common.config.documents import scalar_text
from ...common.config.schema import DEFAULT_ADDRESS, Config, SecurityConfig
from ...common.config.sources import Resolved
from ...common.errors import UsageError
from ...common.registry import mode_label
from ...common.user_code import is_in_file
from .placement import Place
from .process import Child

SINGLE = "single"  # not a mode of the server: one worker and no server
DEFAULT_HOST = DEFAULT_ADDRESS.rpartition(":")[0]
# The launcher's own affairs. Children log JSON, and at least the events that the launcher lives by.
_NOT_PASSED_ON = ("launch.", "log.")
# Each server of a job has its own, given by the launcher.
_ONE_SERVERS = ("server.shard", "server.coordinator", "server.advertise")


def check_together(resolved: Resolved, modes: tuple[str, ...], script_args: tuple[str, ...]) -> None:
    """Refuse what does not go together with these modes, or with a script or none. Raises UsageError."""
    script, resume = resolved.config.launch.script, resolved.config.checkpoint.resume
    if modes != (SINGLE,):
        resolved.check_options(modes, also="--set ")
    for key, origin in resolved.origins.items():
        if key in _ONE_SERVERS:
            raise UsageError(
                f"{origin}: {key} belongs to one server, and this job has all of them",
                fix="leave it out; --shards S says how many there are, ps-launch numbers them",
            )
        if is_flag(origin) and key.startswith("optimizer.") and script is not None:
            raise UsageError(
                f"{origin} together with the script {script}: the script owns the optimizer",
                fix="set it in the script, where session.optimizer() wraps it",
            )
        if is_flag(origin) and key.startswith(("task.", "train.", "loader.")) and script is not None:
            raise UsageError(
                f"{origin} together with the script {script}: the script has its own model, data and loop, no task "
                "is run",
                fix="leave one of them out",
            )
        if is_flag(origin) and key.startswith("checkpoint.") and modes == (SINGLE,):
            raise UsageError(
                f"{origin} together with --mode {SINGLE}: a worker alone has no server that takes snapshots",
                fix="train with a server, e.g. -n 1 --mode sync",
            )
    if resolved.config.launch.web and modes == (SINGLE,):
        raise UsageError(
            f"{resolved.origins['launch.web']} together with --mode {SINGLE}: a worker alone has no server, and so no "
            "page",
            fix="leave one of them out; a run with a server is e.g. -n 1 --mode sync",
        )
    if script is not None and SINGLE in modes:
        raise UsageError(
            f"--mode {SINGLE} is a task alone on the union batch, and the script {script} has batches of its own",
            fix=f"run it alone, without ps-launch: python {' '.join((script, *script_args))}",
        )
    if script_args and script is None:
        raise UsageError(
            f"arguments after -- ({' '.join(script_args)}) belong to a script, and there is none",
            fix="give the script: --script FILE.py -- ARGS",
        )
    batch, group = resolved.config.run.batch_size, resolved.config.launch.group
    if batch % group and script is None and modes != (SINGLE,):
        raise UsageError(
            f"a batch of {batch} samples (run.batch_size) cannot be divided among {group} processes of each worker "
            "(launch.group)",
            fix=f"a batch size that is a multiple of {group}",
        )
    num_seeds = resolved.config.launch.seeds
    if resume not in (None, "latest", "never") and len(modes) * num_seeds > 1:
        many = f"of one mode, and {len(modes)}" if len(modes) > 1 else f"of one seed, and {num_seeds}"
        raise UsageError(
            f"{resolved.origins['checkpoint.resume']}: {resume} is a snapshot {many} are to run",
            fix="run one, or let each go on from its own newest: --resume latest",
        )


def is_flag(origin: str) -> bool:
    """Whether a setting comes from the launcher's own command line."""
    return origin.startswith(("flag ", "--set "))


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


def own_path(path: str | None, mode: str, num_modes: int) -> str | None:
    """`weights-sync.safetensors` for `weights.safetensors` when several modes run."""
    if path is None or num_modes == 1:
        return path
    pure, mode = PurePath(path), mode_label(mode)
    if pure.name in ("", ".."):  # `.`, `..` or `/`: a directory without a name to add to
        return str(pure / mode)
    return str(pure.with_name(f"{pure.stem}-{mode}{pure.suffix}"))


def own_identity(security: SecurityConfig, child: Child, exists: Callable[[str], bool]) -> dict[str, Any]:
    """The settings in which the certificate of a worker, or of one of several shards, differs from the configured one.

    UsageError where it needs one of its own and there is none.
    """
    is_worker = child.role == "worker"
    if security.cert is None or not security.mutual:
        return {"security.cert": None, "security.key": None} if security.cert and is_worker else {}
    folder, rank = PurePath(security.cert).parent, child.rank
    for name in (f"rank-{rank}", "worker") if is_worker else (f"shard-{rank}",):
        if exists(str(folder / f"{name}.crt")):
            return {"security.cert": str(folder / f"{name}.crt"), "security.key": str(folder / f"{name}.key")}
    if is_worker:
        lacks = f"worker {rank} needs a certificate, and there is neither rank-{rank}.crt nor worker.crt"
        option = "--workers N makes one for each rank"
    else:
        lacks = f"shard {rank} needs a certificate of its own, and there is no shard-{rank}.crt"
        option = "--shards S makes one for each shard"
    raise UsageError(f"security.mutual: {lacks} beside {security.cert}", fix=f"ps-certs init {folder} --renew {option}")


def code_file(config: Config) -> str | None:
    """The user's own file that workers run: the script, or the one with the task; None for a built-in task."""
    if config.launch.script is not None:
        return config.launch.script
    return file_of(config.task.name)


def file_of(name: str) -> str | None:
    """The file of a `FILE.py:NAME`, None for a built-in one."""
    return name.rpartition(":")[0] if is_in_file(name) else None


def read_files(security: SecurityConfig, identity: Mapping[str, Any], code: str | None) -> tuple[str, ...]:
    """Files that must be there where a process with these settings of its own, and this file of code, runs."""
    own = [identity.get(f"security.{name}", getattr(security, name)) for name in ("cert", "key")]
    return tuple(path for path in (code, security.ca, *own, security.token_file) if path is not None)
