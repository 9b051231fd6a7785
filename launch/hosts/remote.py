"""Resolves --hosts before anything starts: the hosts, their addresses, and the placement of processes."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath

from ...common.config.addresses import is_loopback, split_address
from ...common.config.schema import Config
from ...common.config.sources import Resolved
from ...common.errors import AuthError, raise_first
from ...common.registry import MODES
from ...common.security import TOKEN_VARIABLE, check_exposure
from ..backends.base import Backend
from ..plan.hosts import THIS_MACHINE, Host, load_hosts, place_workers
from ..plan.runs import Plan
from ..plan.settings import code_file

_SSH_CONFIG_S = 10.0


def hosts_of(config: Config) -> tuple[Host, ...]:
    """Returns the hosts of --hosts, each with its address. Raises UsageError."""
    if config.launch.hosts is None:
        return ()
    hosts = load_hosts(config.launch.hosts)
    if not _is_command(config.launch.ssh):
        return hosts
    with ThreadPoolExecutor(8) as pool:
        return tuple(pool.map(lambda host: _with_address(host, config.launch.ssh), hosts))


def _with_address(host: Host, ssh: str) -> Host:
    """Returns the host with the name behind an alias of ~/.ssh/config, which only ssh knows."""
    if host.address is not None or host.host == THIS_MACHINE:
        return host
    try:
        found = subprocess.run(
            [*shlex.split(ssh), "-G", "--", host.host],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_SSH_CONFIG_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return host  # the connection reports the error
    names = [line.split()[1] for line in found.stdout.splitlines() if line.startswith("hostname ")]
    return host.model_copy(update={"address": names[0] if names else host.host})


def _is_command(text: str) -> bool:
    try:
        return bool(shlex.split(text))
    except ValueError:
        return False


def check_remote(resolved: Resolved, backend: type[Backend], hosts: Sequence[Host], num_workers: int) -> None:
    """Raise UsageError for settings that do not go together with this backend and these hosts."""
    config, origins, launch = resolved.config, resolved.origins, resolved.config.launch
    origin, spans, name = origins.get("launch.backend"), backend.spans_hosts, launch.backend or "ssh"
    path, num_shards, copies = code_file(config), config.server.shards, launch.sync_code
    num = num_shards  # by default one on each host that has workers
    if launch.colocate and hosts and resolved.was_set("server.shards"):
        num = len({host.host for host in place_workers(hosts, num_workers)})
    raise_first(
        (launch.hosts is not None and not backend.takes_hosts,
         f"{origin}: backend {name} takes no hosts, and {origins.get('launch.hosts')} names some",
         "leave one of the two out; hosts mean --backend ssh"),
        (backend.takes_hosts and launch.hosts is None, f"{origin}: backend {name} needs hosts", "--hosts hosts.yaml"),
        (spans and launch.serve is not None,
         f"{origins.get('launch.serve')}: with backend {name} no host is known for ps-serve",
         "start it where clients reach it: ps-serve --server HOST:PORT"),
        (not _is_command(launch.ssh), f"{origins.get('launch.ssh')}: {launch.ssh!r} is no command", "e.g. ssh -F FILE"),
        (num_shards != num, f"{origins.get('server.shards')}: {num_shards} shards, and --colocate means one on each "
         f"of the {num} hosts that have workers", "leave --shards out"),
        (launch.colocate and not hosts, "--colocate: there are no hosts to put shards on", "--hosts hosts.yaml"),
        (copies and not hosts, "--sync-code: there are no hosts to copy to", "--hosts hosts.yaml"),
        (copies and path is None, f"--sync-code: task {config.task.name} is built in, there is nothing to copy",
         "leave it out, or give --task FILE.py:NAME or --script FILE.py"),
        (copies and (PurePath(path or "").is_absolute() or ".." in PurePath(path or "").parts),
         f"--sync-code: {path} is not below this directory, and has no place below workdir there",
         "start ps-launch where the file is, and name it without its directory"),
        (copies and not os.path.isfile(path or ""), f"--sync-code: no file {path}",
         "the path is relative to where you are"),
        (launch.script is not None and not spans and not os.path.isfile(launch.script),
         f"{origins.get('launch.script')}: no file {launch.script}", "the path is relative to where you are"),
    )  # fmt: skip


def check_plan_exposure(plan: Plan) -> None:
    """Raise AuthError where other machines can reach servers or peers without TLS, token or --insecure."""
    if plan.server is None or plan.config.server.insecure:
        return
    listens = [listen_of(spec.argv) for spec in (plan.server, *plan.shards(""))]
    address = next((listen for listen in listens if not is_loopback(split_address(listen)[0])), None)
    if address is None:
        return
    has_token = plan.config.security.token_file is not None or bool(os.environ.get(TOKEN_VARIABLE))
    check_exposure("the server", address, plan.config, has_token=has_token)
    if (plan.config.run.workers or 1) > 1 and MODES.load(plan.mode).kind.has_peers:
        raise AuthError(
            f"workers of mode {plan.mode} would exchange gradients in the clear, where other machines can reach "
            f"them (on {address}): torch's Gloo and NCCL have neither TLS nor a check of who connects",
            fix="on a network you trust (their own, or a tunnel such as WireGuard) add --insecure; or take --mode sync",
        )


def listen_of(argv: Sequence[str]) -> str:
    """Returns the address that a planned server listens on."""
    prefix = "server.listen="
    return next(word.removeprefix(prefix).strip("\"'") for word in reversed(argv) if word.startswith(prefix))
