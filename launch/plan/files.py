"""Which files of the configuration are whose: of each mode, and of each worker. Pure.

Where several modes run, each has its own weights, history and snapshots. Of the certificates, the
configured one is the server's. Workers have none, or with mutual TLS those that `ps-certs init` has
put beside it: `rank-N.crt`, or `worker.crt` for all; each of several shards then has `shard-N.crt`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from ...common.config.schema import Config, SecurityConfig
from ...common.config.sources import Resolved
from ...common.errors import UsageError
from ...common.registry import mode_label
from ...common.user_code import is_in_file
from .process import Child

SINGLE = "single"  # not a mode of the server: one worker and no server


def own_path(path: str | None, mode: str, num_modes: int) -> str | None:
    """`weights-sync.safetensors` for `weights.safetensors` when several modes run."""
    if path is None or num_modes == 1:
        return path
    pure, mode = PurePath(path), mode_label(mode)
    if pure.name in ("", ".."):  # `.`, `..` or `/`: a directory without a name to add to
        return str(pure / mode)
    return str(pure.with_name(f"{pure.stem}-{mode}{pure.suffix}"))


def check_snapshots(resolved: Resolved, modes: tuple[str, ...]) -> None:
    """Refuse what asks for snapshots where there are none, or for one snapshot in several modes. Raises UsageError."""
    for key, origin in resolved.origins.items():
        if key.startswith("checkpoint.") and is_flag(origin) and modes == (SINGLE,):
            raise UsageError(
                f"{origin} together with --mode {SINGLE}: a worker alone has no server that takes snapshots",
                fix="train with a server, e.g. -n 1 --mode sync",
            )
    resume = resolved.config.checkpoint.resume
    if resume not in (None, "latest", "never") and len(modes) > 1:
        raise UsageError(
            f"{resolved.origins['checkpoint.resume']}: {resume} is a snapshot of one mode, and {len(modes)} are to run",
            fix="run one mode, or let each go on from its own newest: --resume latest",
        )


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


def is_flag(origin: str) -> bool:
    """Whether a setting comes from the launcher's own command line."""
    return origin.startswith(("flag ", "--set "))
