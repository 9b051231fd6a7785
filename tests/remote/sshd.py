"""A real sshd on 127.0.0.1, .2 and .3 as three hosts, and a way to see what runs on them.

All "hosts" are this machine: one file system, one kernel. What was started over this sshd is known by
SSH_CONNECTION in its environment, which names the port.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

HOSTS = {"node1": "127.0.0.1", "node2": "127.0.0.2", "node3": "127.0.0.3"}
DEADLINE_S = 10.0


class Sshd:
    """The daemon, the keys and the client's configuration, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = _free_port()
        self._write()
        self._daemon = subprocess.Popen(
            ["/usr/sbin/sshd", "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / "sshd.log")]
        )
        end = time.monotonic() + DEADLINE_S
        while not _answers(self.port):
            assert self._daemon.poll() is None, (folder / "sshd.log").read_text()
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
                place = process.environ().get("SSH_CONNECTION", "")
                if place.endswith(f" {self.port}") and process.status() != psutil.STATUS_ZOMBIE:
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
        return psutil.Process(self._daemon.pid).children()

    def close(self) -> None:
        for process in [*self.running(), *psutil.Process(self._daemon.pid).children(recursive=True)]:
            try:
                process.kill()
            except psutil.Error:
                continue
        self._daemon.kill()
        self._daemon.wait()

    def _write(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in ("host_key", "user_key"):
            key = self.folder / name
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        known = (self.folder / "host_key.pub").read_text().rsplit(" ", 1)[0]
        lines = [f"[{address}]:{self.port} {known}" for address in HOSTS.values()]
        (self.folder / "known_hosts").write_text("\n".join(lines) + "\n")
        listen = "\n".join(f"ListenAddress {address}" for address in HOSTS.values())
        (self.folder / "sshd_config").write_text(
            f"Port {self.port}\n{listen}\nHostKey {self.folder}/host_key\nPidFile {self.folder}/pid\n"
            f"AuthorizedKeysFile {self.folder}/user_key.pub\nPasswordAuthentication no\n"
            "PermitRootLogin prohibit-password\nUsePAM no\nStrictModes no\nMaxStartups 100\n"
        )
        entries = "".join(f"Host {name}\n  HostName {address}\n" for name, address in HOSTS.items())
        (self.folder / "ssh_config").write_text(
            f"{entries}Host *\n  Port {self.port}\n  IdentityFile {self.folder}/user_key\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.folder}/known_hosts\n  StrictHostKeyChecking yes\n"
        )


def start_sshd(folder: Path) -> Sshd:
    """A running daemon; skips the test where there cannot be one."""
    if os.geteuid() != 0:
        pytest.skip("needs root: an sshd of its own for a test")
    missing = [name for name in ("/usr/sbin/sshd", "ssh", "ssh-keygen") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs {missing[0]}: apt-get install openssh-server openssh-client")
    return Sshd(folder)


def hosts_yaml(path: Path, *entries: str, workdir: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """A hosts file of this test's interpreter; each entry as in the file, `{host: node1, slots: 2}`."""
    defaults = {"python": sys.executable, "workdir": str(workdir or path.parent), "env": dict(env or {})}
    lines = [f"defaults: {json.dumps(defaults)}", "hosts:"]
    path.write_text("\n".join([*lines, *(f"  - {entry}" for entry in entries)]) + "\n")
    return str(path)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
