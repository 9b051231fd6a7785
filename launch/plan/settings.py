"""Which settings and files each process of a job gets. Pure.

Where several modes run, each has its own weights, history and snapshots. The configured certificate is the server's.
Workers have none, or with mutual TLS those that `ps-certs init` wrote beside it: `rank-N.crt`, or `worker.crt` for
all. Each of several shards then has `shard-N.crt`, and ps-serve `serve.crt`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Any

from ...common.combinations import Choices, choices_of
from ...common.config.schema import DEFAULT_ADDRESS, Config, SecurityConfig
from ...common.config.sources import Resolved, scalar_text
from ...common.errors import UsageError, raise_first
from ...common.kinds import ContributionKind
from ...common.registry import mode_label
from ...common.user_code import is_in_file
from .hosts import Child, Host

SINGLE = "single"  # not a mode of the server: one worker and no server
DEFAULT_HOST = DEFAULT_ADDRESS.rpartition(":")[0]
# Sections that the launcher does not pass on. Children log JSON, with the events that the launcher needs.
_NOT_PASSED_ON = ("launch.", "log.")
# By these a server leaves something behind, or begins from something that another run has left.
LEAVES = (
    "output.save", "output.history", "output.curve", "output.summary", "output.best_weights", "output.track",
    "output.save_averaged", "output.store", "checkpoint.dir", "checkpoint.every_steps", "checkpoint.every_s",
    "checkpoint.resume", "server.metrics",
)  # fmt: skip
# The launcher gives each server of a job its own.
_OF_ONE_SERVER = (
    "server.shard", "server.coordinator", "server.advertise", "upstream.server", "upstream.rank", "upstream.region",
)  # fmt: skip


def check_together(resolved: Resolved, modes: tuple[str, ...], script_args: tuple[str, ...]) -> None:
    """Raise UsageError for settings that do not go together with these modes, or with a script or none."""
    config, origins = resolved.config, resolved.origins
    script, resume, num_seeds = config.launch.script, config.checkpoint.resume, config.launch.seeds
    batch, group, is_alone = config.run.batch_size, config.launch.group, modes == (SINGLE,)
    worker = config.worker
    for key, origin in origins.items():
        raise_first(
            (key in _OF_ONE_SERVER, f"{origin}: {key} belongs to one server, and this job has all of them",
             "leave it out; --shards S says how many there are, ps-launch numbers them"),
            (script is not None and is_flag(origin) and key.startswith("optimizer."),
             f"{origin} together with the script {script}: the script owns the optimizer",
             "set it in the script, where session.optimizer() wraps it"),
            (script is not None and is_flag(origin) and key.startswith(("task.", "train.", "loader.")),
             f"{origin} together with the script {script}: the script has its own model, data and loop",
             "leave one of them out"),
        )  # fmt: skip
    several = f"mode, and {len(modes)}" if len(modes) > 1 else f"seed, and {num_seeds}"
    raise_first(
        (script is not None and SINGLE in modes,
         f"--mode {SINGLE} is a task alone on the union batch, and the script {script} has batches of its own",
         f"run it alone, without ps-launch: python {' '.join((script or '', *script_args))}"),
        (script_args and script is None,
         f"arguments after -- ({' '.join(script_args)}) belong to a script, and there is none",
         "give the script: ps-launch FILE.py ARGS"),
        ((config.launch.group_min or 1) > group,
         f"launch.group_min is {config.launch.group_min}, and launch.group {group}", "at most --group"),
        (config.launch.group_min is not None and not worker.pipeline,
         "launch.group_min without worker.pipeline: only stages may become fewer", "--pipeline, or leave it out"),
        (batch % group and script is None and not is_alone and not worker.pipeline,
         f"a batch of {batch} samples (run.batch_size) cannot be divided among {group} processes of each worker "
         "(launch.group)", f"a batch size that is a multiple of {group}"),
        (resume not in (None, "latest", "never") and len(modes) * num_seeds > 1,
         f"{origins.get('checkpoint.resume')}: {resume} is a snapshot of one {several} are to run",
         "run one, or let each continue from its own newest: --resume latest"),
    )  # fmt: skip


def chosen(resolved: Resolved, mode: str, **more: Any) -> Choices:
    """Returns what the settings choose for the runs of a mode. `more`: other fields of `Choices`."""
    config, origins, launch = resolved.config, resolved.origins, resolved.config.launch
    if mode == SINGLE:
        of_checkpoint = [origin for key, origin in origins.items() if key.startswith("checkpoint.")]
        return Choices(
            mode=SINGLE, kind=ContributionKind.WEIGHTS, is_alone=True, serve=launch.serve,
            web=bool(launch.web),
            snapshots=config.checkpoint.dir if any(map(is_flag, of_checkpoint)) else None,
        )  # fmt: skip
    return choices_of(
        config, mode, is_grouped=launch.group > 1, colocate=launch.colocate, script=launch.script, serve=launch.serve,
        optimizers=() if launch.script is not None else ((config.optimizer.name, config.optimizer.arguments()),),
        **more,
    )  # fmt: skip


def is_flag(origin: str) -> bool:
    """Whether a setting comes from the launcher's own command line."""
    return origin.startswith(("flag ", "--set "))


def passed_settings(resolved: Resolved, *, with_files: bool) -> dict[str, Any]:
    """Returns the validated values of flags and --set by dotted key; `with_files` those of CONFIG as well.

    Children inherit PS_ variables, so values from there are not among them.
    """
    return {
        key: value_of(resolved.config, key)
        for key, origin in resolved.origins.items()
        if (is_flag(origin) or (with_files and not origin.startswith("environment ")))
        and not key.startswith(_NOT_PASSED_ON)
    }


def single_settings(config: Config, num_workers: int) -> dict[str, Any]:
    """Returns the settings that turn a run of N workers into one worker on the union batch."""
    settings: dict[str, Any] = {"run.workers": 1, "run.batch_size": config.run.batch_size * num_workers}
    if config.policy.min_workers > 1:  # it would contradict run.workers=1
        settings["policy.min_workers"] = 1
    if config.policy.option("backup_workers"):
        settings["policy.backup_workers"] = 0
    return settings


def for_workers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings for workers: without the policy of a mode in a file, which may not be on their machine."""
    if not any(is_in_file(str(settings.get(key))) for key in ("run.mode", "run.other_modes")):
        return dict(settings)
    return {key: value for key, value in settings.items() if not key.startswith(("run.mode", "run.other_", "policy."))}


def listen_address(resolved: Resolved, first: Host | None, *, spans_hosts: bool) -> str:
    """Returns the coordinator's address: of server.listen if set, else of its placement, with launch.port."""
    port, listen = resolved.config.launch.port, resolved.config.server.listen
    host = listen.rpartition(":")[0] or DEFAULT_HOST
    if resolved.was_set("server.listen"):
        return listen if port is None else f"{host}:{port}"
    if first is not None:
        host = first.listen
    elif spans_hosts:
        host = "0.0.0.0"
    return f"{host}:{port or 0}"


def arguments(config_path: str | None, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns `--config FILE --set key=value ...`."""
    words = ["--config", config_path] if config_path else []
    for key, value in settings.items():
        words += ["--set", f"{key}={scalar_text(value)}"]
    return tuple(words)


def variable(key: str) -> str:
    """Returns the environment variable of a setting."""
    return f"PS_{key.upper().replace('.', '__')}"


def value_of(config: Config, key: str) -> Any:
    """Returns the value at a dotted key, also within a dict."""
    value: Any = config
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def turned_off(config: Config, keys: Iterable[str]) -> dict[str, bool | None]:
    """Returns the values that turn these settings off."""
    return {key: False if isinstance(value_of(config, key), bool) else None for key in keys}


def own_path(path: str | None, mode: str, num_modes: int) -> str | None:
    """Returns `weights-sync.safetensors` for `weights.safetensors` when several modes run."""
    if path is None or num_modes == 1:
        return path
    pure, mode = PurePath(path), mode_label(mode)
    if pure.name in ("", ".."):  # `.`, `..` or `/`: a directory without a name to add to
        return str(pure / mode)
    return str(pure.with_name(f"{pure.stem}-{mode}{pure.suffix}"))


def own_identity(security: SecurityConfig, child: Child, exists: Callable[[str], bool]) -> dict[str, Any]:
    """Returns the certificate settings of a worker, or of one of several shards, that differ from the configured ones.

    Raises UsageError where the process needs a certificate of its own and there is none.
    """
    is_worker, is_serve = child.role == "worker", child.role == "serve"
    if security.cert is None or not security.mutual:
        return {"security.cert": None, "security.key": None} if security.cert and is_worker else {}
    folder = PurePath(security.cert).parent
    names = (f"rank-{child.rank}", "worker") if is_worker else ("serve" if is_serve else f"shard-{child.rank}",)
    for name in names:
        if exists(str(folder / f"{name}.crt")):
            return {"security.cert": str(folder / f"{name}.crt"), "security.key": str(folder / f"{name}.key")}
    files = " or ".join(f"{name}.crt" for name in names)
    option = " --workers N makes one for each rank" if is_worker else " --shards S makes one for each shard"
    who = child if is_worker or is_serve else f"shard {child.rank}"
    raise UsageError(
        f"security.mutual: {who} needs a certificate, and there is no {files} beside {security.cert}",
        fix=f"ps-certs init {folder} --renew{'' if is_serve else option}",
    )


def code_file(config: Config) -> str | None:
    """Returns the user's file that workers run: the script, or the file of the task; None for a built-in task."""
    return config.launch.script if config.launch.script is not None else file_of(config.task.name)


def file_of(name: str) -> str | None:
    """Returns the file of a `FILE.py:NAME`, None for a built-in name."""
    return name.rpartition(":")[0] if is_in_file(name) else None


def read_files(security: SecurityConfig, identity: Mapping[str, Any], code: str | None) -> tuple[str, ...]:
    """Returns the files that a process with these certificate settings and this file of code reads."""
    files = [identity.get(f"security.{name}", getattr(security, name)) for name in ("cert", "key")]
    files += [identity.get("upstream.cert"), identity.get("upstream.key")]
    return tuple(path for path in (code, security.ca, *files, security.token_file) if path is not None)
