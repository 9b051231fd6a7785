"""A Slurm cluster of this machine: one controller, nodes that are daemons with ports of their own, own munge.

Everything lives in one folder, listens on free ports and is ended by its pid. The first node has this
machine's name, so that its name in SLURM_JOB_NODELIST is one at which a server can be reached.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from paramserver.launch.hosts.agent import end_with
from paramserver.tests.ports import free_port

NEEDED = ("slurmctld", "slurmd", "srun", "sbatch", "munged", "mungekey")
DEADLINE_S = 90.0


def missing() -> str | None:
    """Why there can be no cluster here; None when there can."""
    if os.geteuid() != 0:
        return "a Slurm cluster of one's own needs root (slurmd sets user ids)"
    absent = [name for name in NEEDED if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install -y --no-install-recommends slurm-wlm munge"
    return None


def running(folder: Path) -> Iterator[SlurmCluster]:
    """The payload of a fixture: a cluster in `folder`, or a loud skip."""
    why = missing()
    if why is not None:
        pytest.skip(why)
    cluster = SlurmCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


class SlurmCluster:
    """Three nodes of `cpus` each. `env` is what its clients (srun, sbatch, ...) need."""

    host = socket.gethostname()
    nodes = (host, f"{host}-2", f"{host}-3")

    def __init__(self, folder: Path, cpus: int = 4) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._is_up = False
        self.conf = folder / "slurm.conf"
        self.env = {"SLURM_CONF": str(self.conf), "PATH": _PATH}
        self._write_conf(cpus)

    def start(self) -> None:
        """Start all daemons; returns when every node is idle."""
        key, munge = self.folder / "munge.key", self.folder / "munge.socket"
        subprocess.run(["mungekey", "--create", f"--keyfile={key}"], check=True, env={"PATH": _PATH})
        self.folder.chmod(0o755)
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}",
            f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/munged.seed",
            f"--log-file={self.folder}/munged.log", "--num-threads=2",
        )  # fmt: skip
        self.until(munge.exists, "munged listens")
        self._daemon("slurmctld", "-D", "-f", str(self.conf))
        for node in self.nodes:
            self._daemon("slurmd", "-D", "-f", str(self.conf), "-N", node)
        self.until(self._all_idle, "every node is idle")
        self._is_up = True

    def run(
        self, *argv: str, env: Mapping[str, str] = os.environ, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A client to its end."""
        env = {"PATH": _PATH, **env, "SLURM_CONF": str(self.conf)}
        return subprocess.run(argv, env=env, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)

    def jobs(self) -> list[str]:
        """Jobs that are not over, steps too."""
        return self.run("squeue", "--noheader", "--format=%i %j %T").stdout.split("\n")[:-1]

    def stop(self) -> None:
        """End the daemons, and the jobs first; nothing is left of either."""
        if self._is_up:
            with suppress(subprocess.SubprocessError):
                self.run("scancel", "--user=root", "--signal=KILL", "--full")
                self.run("scancel", "--user=root")
                self.until(lambda: self.jobs() == [], "no job is left")
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(timeout=DEADLINE_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def log(self) -> str:
        """What the daemons said, for a failing test."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def _write_conf(self, cpus: int) -> None:
        controller, *ports = [free_port() for _ in range(1 + len(self.nodes))]
        lines = [
            "ClusterName=test", f"SlurmctldHost={self.host}(127.0.0.1)", f"SlurmctldPort={controller}",
            "SlurmUser=root", "SlurmdUser=root", "AuthType=auth/munge", f"AuthInfo=socket={self.folder}/munge.socket",
            "CredType=cred/munge", "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none", "AccountingStorageType=accounting_storage/none",
            "MpiDefault=none", "MailProg=/bin/true", "ReturnToService=2",
            "SwitchType=switch/none", "SchedulerType=sched/backfill",
            "SchedulerParameters=sched_min_interval=1", "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core",
            f"StateSaveLocation={self.folder}/state", f"SlurmdSpoolDir={self.folder}/spool-%n",
            f"SlurmctldPidFile={self.folder}/slurmctld.pid", f"SlurmdPidFile={self.folder}/slurmd-%n.pid",
            f"SlurmctldLogFile={self.folder}/slurmctld.log", f"SlurmdLogFile={self.folder}/slurmd-%n.log",
            "KillWait=5", "PropagateResourceLimits=NONE", "SlurmdParameters=config_overrides",
            *(
                f"NodeName={node} NodeHostname={self.host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=2000"
                for node, port in zip(self.nodes, ports, strict=True)
            ),
            "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        ]  # fmt: skip
        (self.folder / "state").mkdir()
        self.conf.write_text("\n".join(lines) + "\n")

    def _daemon(self, *argv: str) -> None:
        env = {**os.environ, **self.env}
        with (self.folder / f"{argv[0]}-{len(self._daemons)}.out.log").open("wb") as log:
            daemon = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=end_with(os.getpid()),  # also where the tests are killed
            )  # fmt: skip
        self._daemons.append(daemon)

    def _all_idle(self) -> bool:
        states = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").stdout.split("\n")[:-1]
        return sorted(states) == sorted(f"{node} idle" for node in self.nodes)

    def until(self, condition: Callable[[], bool], description: str) -> None:
        """Wait for something; the daemons must live."""
        end = time.monotonic() + DEADLINE_S
        while not condition():
            for daemon in self._daemons:
                assert daemon.poll() is None, f"{daemon.args} ended\n{self.log()}"
            assert time.monotonic() < end, f"not within {DEADLINE_S} s: {description}\n{self.log()}"
            time.sleep(0.05)  # the pause of a poll
