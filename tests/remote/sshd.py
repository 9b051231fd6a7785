"""A real sshd on 127.0.0.1, .2 and .3 as three hosts, or one in each network namespace; what runs on them.

All "hosts" are this machine: one file system, one kernel. What was started over this sshd is known by
SSH_CONNECTION in its environment, which names the port.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from paramserver.tests.ports import free_port

HOSTS = {"node1": "127.0.0.1", "node2": "127.0.0.2", "node3": "127.0.0.3"}
DEADLINE_S = 120.0


class Sshd:
    """The daemon, the keys and the client's configuration, in one folder."""

    def __init__(self, folder: Path, hosts: Mapping[str, str] = HOSTS, at: Sequence[tuple[str, ...]] = ((),)) -> None:
        """`at`: the command prefixes with which a daemon is started, one for each namespace."""
        self.folder = folder
        self.port = free_port()
        self._write(hosts, listen=hosts.values() if at == ((),) else ["0.0.0.0"])
        self._daemons = []
        for index, prefix in enumerate(at):
            log = folder / f"sshd-{index}.log"
            command = [*prefix, "/usr/sbin/sshd", "-D", "-f", str(folder / "sshd_config"), "-E", str(log)]
            self._daemons.append(daemon := subprocess.Popen(command))
            end = time.monotonic() + DEADLINE_S
            while not (log.exists() and "Server listening" in log.read_text()):
                assert daemon.poll() is None, log.read_text()
                assert time.monotonic() < end, "sshd does not listen"
                time.sleep(0.02)

    @property
    def ssh(self) -> str:
        """The ssh command that knows the hosts: for launch.ssh."""
        return f"ssh -F {self.folder / 'ssh_config'}"

    def running(self) -> list[psutil.Process]:
        """What runs on the hosts: agents, their guardians, and what they have started."""
        found = []
        for process in psutil.process_iter():
            try:
                address = process.environ().get("SSH_CONNECTION", "")
                if address.endswith(f" {self.port}") and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def left(self) -> list[str]:
        """The same, as command lines."""
        found = []
        for process in self.running():
            try:
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
            except psutil.Error:
                continue
        return found

    def sessions(self) -> list[psutil.Process]:
        """The daemon's side of each open connection."""
        return [child for daemon in self._daemons for child in psutil.Process(daemon.pid).children()]

    def close(self) -> None:
        for process in [*self.running(), *self.sessions()]:
            try:
                process.kill()
            except psutil.Error:
                continue
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()

    def _write(self, hosts: Mapping[str, str], listen: Iterable[str]) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in ("host_key", "user_key"):
            key = self.folder / name
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        known = (self.folder / "host_key.pub").read_text().rsplit(" ", 1)[0]
        lines = [f"[{address}]:{self.port} {known}" for address in hosts.values()]
        (self.folder / "known_hosts").write_text("\n".join(lines) + "\n")
        addresses = "\n".join(f"ListenAddress {address}" for address in listen)
        (self.folder / "sshd_config").write_text(
            f"Port {self.port}\n{addresses}\nHostKey {self.folder}/host_key\nPidFile none\n"
            f"AuthorizedKeysFile {self.folder}/user_key.pub\nPasswordAuthentication no\n"
            "PermitRootLogin prohibit-password\nUsePAM no\nStrictModes no\nMaxStartups 100\n"
        )
        entries = "".join(f"Host {name}\n  HostName {address}\n" for name, address in hosts.items())
        (self.folder / "ssh_config").write_text(
            f"{entries}Host *\n  Port {self.port}\n  IdentityFile {self.folder}/user_key\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.folder}/known_hosts\n  StrictHostKeyChecking yes\n"
        )


def need_sshd() -> None:
    """Skip the test where there cannot be one."""
    if os.geteuid() != 0:
        pytest.skip("needs root: an sshd of its own for a test")
    missing = [name for name in ("/usr/sbin/sshd", "ssh", "ssh-keygen") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs {missing[0]}: apt-get install openssh-server openssh-client")


def hosts_yaml(path: Path, *entries: str, workdir: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """A hosts file of this test's interpreter; each entry as in the file, `{host: node1, slots: 2}`."""
    defaults = {"python": sys.executable, "workdir": str(workdir or path.parent), "env": dict(env or {})}
    lines = [f"defaults: {json.dumps(defaults)}", "hosts:"]
    path.write_text("\n".join([*lines, *(f"  - {entry}" for entry in entries)]) + "\n")
    return str(path)
