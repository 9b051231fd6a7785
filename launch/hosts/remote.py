"""What --hosts means for a run, worked out before anything starts: the hosts, their addresses, who runs where."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath

from ...common.config.addresses import split_address
from ...common.config.schema import Config
from ...common.config.sources import Resolved
from ...common.errors import AuthError, UsageError
from ...common.registry import MODES
from ...common.security import TOKEN_VARIABLE, is_loopback
from ..plan.hosts import THIS_MACHINE, Host, load_hosts
from ..plan.placement import Place, num_colocated, place
from ..plan.process import Child
from ..plan.runs import Plan
from ..plan.settings import code_file

_SSH_CONFIG_S = 10.0


def hosts_of(config: Config) -> tuple[Host, ...]:
    """The hosts of --hosts, each with its address. Raises UsageError."""
    if config.launch.hosts is None:
        return ()
    hosts = load_hosts(config.launch.hosts)
    if not _is_command(config.launch.ssh):
        return hosts
    with ThreadPoolExecutor(8) as pool:
        return tuple(pool.map(lambda host: _with_address(host, config.launch.ssh), hosts))


def _with_address(host: Host, ssh: str) -> Host:
    """An alias of ~/.ssh/config is a name for ssh only: others know what it stands for."""
    if host.address is not None or host.host == THIS_MACHINE:
        return host
    try:
        asked = subprocess.run(
            [*shlex.split(ssh), "-G", "--", host.host],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_SSH_CONFIG_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return host  # the connection will say what is wrong
    names = [line.split()[1] for line in asked.stdout.splitlines() if line.startswith("hostname ")]
    return host.model_copy(update={"address": names[0] if names else host.host})


def _is_command(text: str) -> bool:
    try:
        return bool(shlex.split(text))
    except ValueError:
        return False


def places_of(config: Config, hosts: Sequence[Host], num_workers: int, folder: str) -> dict[Child, Place]:
    """Who runs where, as far as hosts are given. Raises UsageError."""
    if not hosts:
        if config.launch.colocate:
            raise UsageError("--colocate: there are no hosts to put shards on", fix="--hosts hosts.yaml")
        return {}
    return place(
        hosts, num_workers, config.server.shards, colocate=config.launch.colocate, folder=folder,
        group=config.launch.group,
    )  # fmt: skip


def check_remote(resolved: Resolved, hosts: Sequence[Host], num_workers: int) -> None:
    """Settings that do not go together with hosts. Raises UsageError."""
    config = resolved.config
    if not _is_command(config.launch.ssh):
        raise UsageError(
            f"{resolved.origins['launch.ssh']}: {config.launch.ssh!r} is no command", fix="e.g. ssh -F FILE"
        )
    if config.launch.colocate and hosts and resolved.was_set("server.shards"):
        num_shards = num_colocated(hosts, num_workers)
        if config.server.shards != num_shards:
            raise UsageError(
                f"{resolved.origins['server.shards']}: {config.server.shards} shards, and --colocate means one on each "
                f"of the {num_shards} hosts that have workers",
                fix="leave --shards out",
            )
    if not config.launch.sync_code:
        return
    if not hosts:
        raise UsageError("--sync-code: there are no hosts to copy to", fix="--hosts hosts.yaml")
    path = code_file(config)
    if path is None:
        raise UsageError(
            f"--sync-code: task {config.task.name} is built in, there is nothing to copy",
            fix="leave it out, or give --task FILE.py:NAME or --script FILE.py",
        )
    if PurePath(path).is_absolute() or ".." in PurePath(path).parts:
        raise UsageError(
            f"--sync-code: {path} is not below this directory, and has no place below workdir there",
            fix="start ps-launch where the file is, and name it without its directory",
        )
    if not os.path.isfile(path):
        raise UsageError(f"--sync-code: no file {path}", fix="the path is relative to where you are")


def check_exposure(plan: Plan) -> None:
    """AuthError for servers and peers that other machines can reach, in the clear or by anybody, without consent."""
    security = plan.config.security
    if plan.server is None or plan.config.server.insecure:
        return
    listens = [listen_of(spec.argv) for spec in (plan.server, *plan.shards(""))]
    open_address = next((listen for listen in listens if not is_loopback(split_address(listen)[0])), None)
    if open_address is None:
        return
    lacks = []
    if security.cert is None:
        lacks.append("the connection is not encrypted (--cert, --key)")
    if security.token_file is None and not os.environ.get(TOKEN_VARIABLE):
        lacks.append(f"there is no token (--token-file, or {TOKEN_VARIABLE})")
    if lacks:
        raise AuthError(
            f"the server is to listen on {open_address}, where other machines can reach it, and {' and '.join(lacks)}",
            fix="ps-certs init makes certificates and a token; on a network you trust add --insecure",
        )
    if (plan.config.run.workers or 1) > 1 and MODES.load(plan.mode).kind.has_peers:
        raise AuthError(
            f"workers of mode {plan.mode} would exchange gradients in the clear, where other machines can reach "
            f"them (on {open_address}): torch's Gloo and NCCL have neither TLS nor a check of who connects",
            fix="on a network you trust (their own, or a tunnel such as WireGuard) add --insecure; or take --mode sync",
        )


def listen_of(argv: Sequence[str]) -> str:
    """The address a planned server is told to listen on."""
    prefix = "server.listen="
    return next(word.removeprefix(prefix).strip("\"'") for word in reversed(argv) if word.startswith(prefix))
