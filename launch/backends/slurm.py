"""Processes as steps of a Slurm job: `srun` in the allocation that the launcher runs in, or in a new one.

Each process is a step of one task on the node that the backend chose, so that each can be ended and restarted alone:
an agent (`launch/hosts/agent.py`) with that one process. srun carries the launcher's messages over its standard input.
Signals would not work: srun answers a SIGTERM by killing its step, and a killed srun leaves its step behind.

A new allocation belongs to an salloc whose command reads from the launcher, so it ends with the launcher. Partition,
time and GPUs are set as for any salloc, in SALLOC_ variables.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import subprocess
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence

from ...common.errors import UsageError
from ..hosts.connection import Connection, agent_command, watched
from ..plan.hosts import Allocation, Child, ProcessSpec, Task, parse_counts, place_on_nodes
from ..supervise.restarts import CANNOT_START, HOST_LOST
from .base import Backend, OnExit, OnLine, Running, Site, command_text, end_helper, start_helper

_STEP = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mpi=none", "--unbuffered")
# salloc runs this: it prints the allocation, then keeps it until the launcher is gone.
_HOLDER = "env | grep ^SLURM_; echo .; exec cat"
# Ranks in a step of one task, which are not the ranks of the run.
_STEPS_OWN = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS")
_NOT_FOR_SRUN = re.compile(r"SLURM_(?!CONF$)")
_NO_BINDING = "srun: cluster configuration lacks support for cpu binding"  # it is off already
_WAITS = re.compile(r"queued and waiting|error")  # lines of salloc that people should see


class SlurmBackend(Backend):
    """See `base.Backend`."""

    spans_hosts = True
    has_agent_each = True

    def __init__(self, on_line: OnLine, on_exit: OnExit, site: Site) -> None:
        super().__init__(on_line, on_exit, site)
        self._holder: Process | None = None
        self._allocation: Allocation | None = None
        self._places: dict[Child, Task] = {}

    async def prepare(self, specs: Sequence[ProcessSpec]) -> None:
        absent = [program for program in ("srun", "salloc", "scontrol") if shutil.which(program) is None]
        if absent:
            raise UsageError(f"no {absent[0]} on this machine", fix="start ps-launch where jobs are submitted from")
        environ = dict(os.environ)
        if "SLURM_JOB_ID" not in environ:
            environ |= await self._allocate(specs)
        self._allocation = await asyncio.to_thread(_allocation, environ)
        self._places = place_on_nodes(specs, self._allocation)
        shown = ("scontrol", "show", "node", "--oneliner", ",".join(self._allocation.nodes))
        text = await asyncio.to_thread(_client, *shown)
        known = dict(re.findall(r"^NodeName=(\S+).*? NodeAddr=(\S+)", text, flags=re.MULTILINE))
        self._addresses = {child: known.get(where.node, where.node) for child, where in self._places.items()}

    async def _agent(self, running: Running) -> tuple[Connection, Mapping[str, str], str]:
        assert self._allocation is not None
        spec, where = running.spec, self._places[running.spec.child]
        connection = self._connection(
            name=where.node,
            command=(*_srun(spec, where.node, self._allocation.job), *agent_command(*_STEPS_OWN, passes_on=True)),
            env=_for_slurm(),
            folder=self._site.folder,
            is_left_alone=True,
            on_command_line=lambda line: self._lines(running, [line] if line != _NO_BINDING else []),
        )
        connection.begin()
        env = self._threads_env(where.num_threads)
        if spec.child.role != "server":
            env["PS_WORKER__LOCAL_RANK"] = str(where.local_rank)
        return connection, env, "."

    def _lost(self, running: Running, connection: Connection) -> tuple[int, str]:
        step, node = connection.hello.get("step"), self._places[running.spec.child].node
        lost = f"step {step} on {node} was lost" if step else f"no step could be started on {node}"
        self._lines(running, [f"{lost}: srun ended with {connection.code}"])
        _cancel_left(connection)
        return HOST_LOST if step else CANNOT_START, ""

    async def close(self) -> None:
        await super().close()
        for connection in self._connections:
            _cancel_left(connection)
        if self._holder is not None:
            # A salloc that still waits for nodes has a command that does not read yet. Terminated while it ends by
            # itself it may hang (seen in Slurm 22.05).
            await end_helper(self._holder, terminates=self._allocation is None)

    @classmethod
    def dry_run(cls, specs: Sequence[ProcessSpec], site: Site) -> list[str]:
        lines = []
        if "SLURM_JOB_ID" not in os.environ:
            lines.append(f"[allocation] {shlex.join(_salloc(len(specs)))}")
        for spec in specs:
            lines.append(f"[{spec.child}] {command_text(spec, *_srun(spec, 'NODE', 'JOB'))}")
        return lines

    async def _allocate(self, specs: Sequence[ProcessSpec]) -> dict[str, str]:
        """Allocate a job with a task for each process, and return its variables."""
        self._holder = holder = await start_helper(*_salloc(len(specs)), env=_for_slurm())
        assert holder.stdout is not None
        showing = self._until_closed(watched(self._show_lines(holder, specs[0].child)))
        variables: dict[str, str] = {}
        async for raw in holder.stdout:  # up to the holder's full stop; nothing without an allocation
            name, equals, value = raw.decode("utf-8", "replace").rstrip("\n").partition("=")
            if not equals:
                break
            variables[name] = value
        if "SLURM_JOB_ID" not in variables:
            why = await showing or "salloc ended without output"
            raise UsageError(f"Slurm gives no nodes: {why}", fix="SALLOC_PARTITION and the like say what to ask for")
        return variables

    async def _show_lines(self, holder: Process, first: Child) -> str:
        """Show the lines of salloc about waiting and errors, and return all lines."""
        assert holder.stderr is not None
        lines = []
        async for raw in holder.stderr:
            lines.append(raw.decode("utf-8", "replace").strip())
            if _WAITS.search(lines[-1]):
                self._on_line(first, lines[-1])
        return "\n".join(lines)


def _for_slurm() -> dict[str, str]:
    """Returns the environment without the variables of a job, which srun would take for options."""
    return {name: value for name, value in os.environ.items() if not _NOT_FOR_SRUN.match(name)}


def _srun(spec: ProcessSpec, node: str, job: str) -> tuple[str, ...]:
    """Returns the command line before the agent's."""
    name = str(spec.child).replace(" ", "-")
    return (*_STEP, f"--jobid={job}", f"--nodelist={node}", f"--job-name=ps-{name}")


def _salloc(num_tasks: int) -> tuple[str, ...]:
    return ("salloc", f"--ntasks={num_tasks}", "--job-name=ps-launch", "sh", "-c", _HOLDER)


def _allocation(environ: dict[str, str]) -> Allocation:
    nodes = tuple(_client("scontrol", "show", "hostnames", environ["SLURM_JOB_NODELIST"]).split())
    cores = parse_counts(environ.get("SLURM_JOB_CPUS_PER_NODE", "1"))
    # A job that says how many tasks it has; otherwise it has as many as cores.
    tasks = parse_counts(environ["SLURM_TASKS_PER_NODE"]) if "SLURM_TASKS_PER_NODE" in environ else cores
    return Allocation(environ["SLURM_JOB_ID"], nodes, tasks, cores)


def _client(*argv: str) -> str:
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    if result.returncode:
        raise UsageError(f"{shlex.join(argv)}: {result.stderr.strip()}", fix="see that Slurm answers: sinfo")
    return result.stdout


def _cancel_left(connection: Connection) -> None:
    """Cancel the step of an srun that did not end by itself."""
    step = connection.hello.get("step")
    if step and (connection.code is None or connection.code < 0):
        subprocess.run(["scancel", "--signal=KILL", step], capture_output=True, check=False)


ENTRY = SlurmBackend
