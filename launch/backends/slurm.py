"""Processes as steps of a Slurm job: `srun` in the allocation the launcher runs in, or in one it makes itself.

Each process is a step of one task on the node that the backend chose, so that each can be ended and started
again alone: an agent (`launch/hosts/agent.py`) with that one process, to which srun carries the launcher's words
over its standard input. Signals do not do it: srun answers a SIGTERM by killing its step, and a killed srun
leaves its step behind.

An allocation of the launcher's own is held by an salloc whose command reads from the launcher: it ends with it.
What to ask for (partition, time, GPUs) is said as for any salloc, in SALLOC_ variables.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ...common.config.sources import LAUNCHER_ENV_NAMES
from ...common.errors import UsageError
from ..hosts.connection import Connection, Route, Unreachable, agent_command
from ..plan.allocation import Allocation, Place, parse_counts, place
from ..plan.process import Child, ProcessSpec
from ..supervise.exits import CANNOT_START, HOST_LOST
from .base import AgentBackend, OnExit, OnLine, Running, Site, with_host

_STEP = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mpi=none", "--unbuffered")
# What salloc runs: says what it was given, then holds it until the launcher is gone.
_HOLDER = "env | grep ^SLURM_; echo .; exec cat"
# The place in a step of one task, which is not the process's place in the run.
_STEPS_OWN = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS")
_NOT_FOR_SRUN = re.compile(r"SLURM_(?!CONF$)")  # a job's settings are no wishes for its steps
_NO_BINDING = "srun: cluster configuration lacks support for cpu binding"  # then there is none to turn off
_WAITS = re.compile(r"queued and waiting|error")  # what of salloc's words is news
_END_S = 15.0


class SlurmBackend(AgentBackend):
    """See `base.Backend`."""

    spans_hosts = True

    def __init__(self, on_line: OnLine, on_exit: OnExit, site: Site) -> None:
        super().__init__(on_line, on_exit, site)
        self._loop = asyncio.get_running_loop()
        self._holder: subprocess.Popen[bytes] | None = None
        self._allocation: Allocation | None = None
        self._places: dict[Child, Place] = {}
        self._addresses: dict[str, str] = {}  # of the nodes

    async def prepare(self, specs: Sequence[ProcessSpec]) -> None:
        if self._site.hosts:
            raise UsageError("--hosts together with the backend slurm: Slurm knows its nodes", fix="leave out --hosts")
        absent = [program for program in ("srun", "salloc", "scontrol") if shutil.which(program) is None]
        if absent:
            raise UsageError(f"no {absent[0]} on this machine", fix="start ps-launch where jobs are submitted from")
        environ = dict(os.environ)
        if "SLURM_JOB_ID" not in environ:
            environ |= await self._allocate(specs)
        self._allocation = await asyncio.to_thread(_allocation, environ)
        self._places = place(specs, self._allocation)
        self._addresses = await asyncio.to_thread(_node_addresses, self._allocation.nodes)

    def start(self, spec: ProcessSpec) -> None:
        assert self._allocation is not None
        where = self._places[spec.child]
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in LAUNCHER_ENV_NAMES and not _NOT_FOR_SRUN.match(name)
        }
        route = Route(
            name=where.node,
            command=(*_srun(spec, where.node, self._allocation.job), *agent_command(*_STEPS_OWN, passes_on=True)),
            env=inherited,
            folder=self._site.folder,
            is_left_alone=True,
        )
        running = self._running[spec.child] = Running(spec)
        connection = Connection(route, on_said=lambda line: self._srun_said(running, line))
        try:
            connection.begin()
        except Unreachable as error:
            self._loop.call_soon(self._ended, running, CANNOT_START, str(error))
            return
        self._start_with(connection, running, {**self._own_env(spec, where), **spec.env}, ".")

    def reach(self, child: Child, address: str) -> str:
        node = self._places[child].node
        host = self._addresses.get(node, node)
        host = f"[{host}]" if ":" in host else host
        return with_host(address, {"0.0.0.0": host, "[::]": host})

    def close(self) -> None:
        connections = [running.connection for running in self._running.values() if running.connection is not None]
        self._close(connections)
        for connection in connections:
            _cancel_left(connection)
        if self._holder is not None:
            _release(self._holder, is_granted=self._allocation is not None)

    @classmethod
    def dry_run(cls, specs: Sequence[ProcessSpec], site: Site) -> list[str]:
        lines = []
        if "SLURM_JOB_ID" not in os.environ:
            lines.append(f"[allocation] {shlex.join(_salloc(len(specs)))}")
        for spec in specs:
            env = [f"{name}={shlex.quote(value)}" for name, value in sorted(spec.env.items())]
            lines.append(f"[{spec.child}] {' '.join(env)} {shlex.join((*_srun(spec, 'NODE', 'JOB'), *spec.argv))}")
        return lines

    async def _allocate(self, specs: Sequence[ProcessSpec]) -> dict[str, str]:
        """A job with a task for each process; its variables. Whoever waits for nodes is told so by salloc."""
        clean = {name: value for name, value in os.environ.items() if not _NOT_FOR_SRUN.match(name)}
        self._holder = subprocess.Popen(
            _salloc(len(specs)), env=clean, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        holder, first = self._holder, specs[0].child
        assert holder.stdout is not None and holder.stderr is not None
        said: list[str] = []

        def on_salloc() -> None:
            line = os.read(errors, 1 << 14).decode("utf-8", "replace")
            said.append(line)
            if not line:
                self._loop.remove_reader(errors)
            for each in line.splitlines():
                if _WAITS.search(each):
                    self._on_line(first, each)

        errors = holder.stderr.fileno()
        self._loop.add_reader(errors, on_salloc)
        variables = await asyncio.to_thread(_read_variables, holder)
        self._loop.remove_reader(errors)
        if "SLURM_JOB_ID" not in variables:
            why = "".join(said).strip() or "salloc ended without a word"
            raise UsageError(f"Slurm gives no nodes: {why}", fix="SALLOC_PARTITION and the like say what to ask for")
        return variables

    def _own_env(self, spec: ProcessSpec, where: Place) -> dict[str, str]:
        env = {}
        if self._site.config.worker.threads is None and "OMP_NUM_THREADS" not in os.environ:
            env["OMP_NUM_THREADS"] = str(where.num_threads)
        if spec.child.role != "server":
            env["PS_WORKER__LOCAL_RANK"] = str(where.local_rank)
        return env

    def _srun_said(self, running: Running, line: str) -> None:
        if line != _NO_BINDING:
            self._said(running, [line])

    def _ended(self, running: Running, code: int, why: str) -> None:
        connection = running.connection
        if connection is not None and not self._is_closed:
            if connection.is_lost:
                step, node = connection.hello.get("step"), self._places[running.spec.child].node
                what = f"step {step} on {node} was lost" if step else f"no step could be started on {node}"
                self._said(running, [f"{what}: srun ended with {connection.code}"])
                code, why = HOST_LOST if step else CANNOT_START, ""
            else:  # its agent has nothing else to do
                connection.begin_close()
                connection.close()
            _cancel_left(connection)
        super()._ended(running, code, why)


def _srun(spec: ProcessSpec, node: str, job: str) -> tuple[str, ...]:
    """The command line before the agent's."""
    name = str(spec.child).replace(" ", "-")
    return (*_STEP, f"--jobid={job}", f"--nodelist={node}", f"--job-name=ps-{name}")


def _salloc(num_tasks: int) -> tuple[str, ...]:
    return ("salloc", f"--ntasks={num_tasks}", "--job-name=ps-launch", "sh", "-c", _HOLDER)


def _read_variables(holder: subprocess.Popen[bytes]) -> dict[str, str]:
    """What the holder says it was given, up to its full stop; nothing when there is no allocation."""
    assert holder.stdout is not None
    found: dict[str, str] = {}
    for raw in holder.stdout:
        name, equals, value = raw.decode("utf-8", "replace").rstrip("\n").partition("=")
        if not equals:
            break
        found[name] = value
    return found


def _allocation(environ: dict[str, str]) -> Allocation:
    nodes = tuple(_client("scontrol", "show", "hostnames", environ["SLURM_JOB_NODELIST"]).split())
    cores = parse_counts(environ.get("SLURM_JOB_CPUS_PER_NODE", "1"))
    # A job that says how many tasks it has; otherwise it has as many as cores.
    tasks = parse_counts(environ["SLURM_TASKS_PER_NODE"]) if "SLURM_TASKS_PER_NODE" in environ else cores
    return Allocation(environ["SLURM_JOB_ID"], nodes, tasks, cores)


def _node_addresses(nodes: Sequence[str]) -> dict[str, str]:
    """Where Slurm itself reaches each node."""
    text = _client("scontrol", "show", "node", "--oneliner", ",".join(nodes))
    return dict(re.findall(r"^NodeName=(\S+).*? NodeAddr=(\S+)", text, flags=re.MULTILINE))


def _client(*argv: str) -> str:
    result: Any = subprocess.run(argv, capture_output=True, text=True, check=False)
    if result.returncode:
        raise UsageError(f"{shlex.join(argv)}: {result.stderr.strip()}", fix="see that Slurm answers: sinfo")
    return str(result.stdout)


def _cancel_left(connection: Connection) -> None:
    """Cancel the step of an srun that did not end by itself."""
    step = connection.hello.get("step")
    if step and (connection.code is None or connection.code < 0):
        subprocess.run(["scancel", "--signal=KILL", step], capture_output=True, check=False)


def _release(holder: subprocess.Popen[bytes], *, is_granted: bool) -> None:
    """Give the allocation back: the end of its input ends the holder, and salloc the job."""
    assert holder.stdin is not None
    with suppress(BrokenPipeError):
        holder.stdin.close()
    if not is_granted:  # still waits for nodes, and its command has not begun to read
        holder.send_signal(signal.SIGTERM)  # while it ends by itself this may hang it, seen in Slurm 22.05
    try:
        holder.wait(_END_S)
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.wait()


ENTRY = SlurmBackend
