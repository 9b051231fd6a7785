"""Processes as steps of a Slurm job: `srun` in the allocation the launcher runs in, or in one it makes itself.

Each process is a step of one task on the node that the backend chose, so that each can be ended and started
again alone. srun hands the launcher's requests to a leash (`launch/leash.py`) beside the process over its
standard input, and ends the process when the launcher is gone. Signals do not do it: srun answers a SIGTERM
by killing its step, and a killed srun leaves its step behind.

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
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ...common.config.sources import LAUNCHER_ENV_NAMES
from ...common.errors import UsageError
from .. import leash
from ..allocation import Allocation, Place, parse_counts, place
from ..events import LineSplitter
from ..exits import CANNOT_START, HOST_LOST
from ..plan import Child, ProcessSpec
from .base import Backend, OnExit, OnLine, Site, with_host

_STEP = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mpi=none", "--unbuffered")
# What salloc runs: says what it was given, then holds it until the launcher is gone.
_HOLDER = "env | grep ^SLURM_; echo .; exec cat"
_NOT_FOR_SRUN = re.compile(r"SLURM_(?!CONF$)")  # a job's settings are no wishes for its steps
_NO_BINDING = "srun: cluster configuration lacks support for cpu binding"  # then there is none to turn off
_WAITS = re.compile(r"queued and waiting|error")  # what of salloc's words is news
_END_S = 15.0


@dataclass
class _Running:
    spec: ProcessSpec
    popen: subprocess.Popen[bytes]
    splitter: LineSplitter = field(default_factory=LineSplitter)
    step: str = ""
    code: int | None = None  # what the leash said


class SlurmBackend(Backend):
    """See `base.Backend`."""

    spans_hosts = True

    def __init__(self, on_line: OnLine, on_exit: OnExit, site: Site) -> None:
        self._on_line = on_line
        self._on_exit = on_exit
        self._site = site
        self._loop = asyncio.get_running_loop()
        self._holder: subprocess.Popen[bytes] | None = None
        self._allocation: Allocation | None = None
        self._places: dict[Child, Place] = {}
        self._addresses: dict[str, str] = {}  # of the nodes
        self._running: dict[Child, _Running] = {}

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
        try:
            popen = subprocess.Popen(
                (*_srun(spec, where.node, self._allocation.job), *spec.argv),
                env={**inherited, **self._own_env(spec, where), **spec.env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C is the launcher's
                cwd=self._site.folder,
            )
        except OSError as error:
            self._loop.call_soon(self._report_failed_start, spec.child, f"cannot start srun: {error.strerror}")
            return
        assert popen.stdout is not None
        os.set_blocking(popen.stdout.fileno(), False)
        running = self._running[spec.child] = _Running(spec, popen)
        self._loop.add_reader(popen.stdout.fileno(), self._read, running)

    def terminate(self, child: Child) -> None:
        self._ask(child, b"t")

    def kill(self, child: Child) -> None:
        self._ask(child, b"k")

    def reach(self, child: Child, address: str) -> str:
        node = self._places[child].node
        host = self._addresses.get(node, node)
        host = f"[{host}]" if ":" in host else host
        return with_host(address, {"0.0.0.0": host, "[::]": host})

    def close(self) -> None:
        for child in self._running:
            self._ask(child, b"k")
        deadline = time.monotonic() + _END_S
        for running in self._running.values():
            assert running.popen.stdout is not None
            self._loop.remove_reader(running.popen.stdout.fileno())
            _wait_or_cancel(running, deadline)
        self._running.clear()
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

    def _ask(self, child: Child, word: bytes) -> None:
        if child in self._running:
            stdin = self._running[child].popen.stdin
            assert stdin is not None
            with suppress(BrokenPipeError):
                stdin.write(word)
                stdin.flush()

    def _report_failed_start(self, child: Child, why: str) -> None:
        self._on_line(child, why)
        self._on_exit(child, CANNOT_START)

    def _read(self, running: _Running) -> None:
        """Pass on what a step says, up to its end."""
        assert running.popen.stdout is not None
        pipe = running.popen.stdout.fileno()
        try:
            data = os.read(pipe, 1 << 14)
        except BlockingIOError:
            return
        lines = running.splitter.feed(data) if data else running.splitter.rest()
        for line in lines:
            self._on_step_line(running, line)
        if not data:
            self._loop.remove_reader(pipe)
            self._on_end(running)

    def _on_step_line(self, running: _Running, line: str) -> None:
        own, mark, word = line.partition(leash.MARK)
        if own != _NO_BINDING and (own or not mark):
            self._on_line(running.spec.child, own)
        kind, _, value = word.partition(" ")
        if kind == "step":
            running.step = value
        elif kind == "end":
            running.code = int(value)

    def _on_end(self, running: _Running) -> None:
        child = running.spec.child
        _wait_or_cancel(running, time.monotonic() + _END_S)
        del self._running[child]
        if running.code is None:
            node = self._places[child].node
            what = f"step {running.step} on {node} was lost" if running.step else f"no step could be started on {node}"
            self._on_line(child, f"{what}: srun ended with {running.popen.returncode}")
            running.code = HOST_LOST if running.step else CANNOT_START
        self._on_exit(child, running.code)


def _srun(spec: ProcessSpec, node: str, job: str) -> tuple[str, ...]:
    """The command line before the process's own."""
    name = str(spec.child).replace(" ", "-")
    return (
        *_STEP, f"--jobid={job}", f"--nodelist={node}", f"--job-name=ps-{name}",
        sys.executable, "-I", "-S", leash.__file__,
    )  # fmt: skip


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


def _wait_or_cancel(running: _Running, deadline: float) -> None:
    """Wait for an srun that is to end. A step whose process has not ended by its leash is cancelled."""
    try:
        running.popen.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        running.popen.kill()
        running.popen.wait()
    if running.step and (running.code is None or running.popen.returncode < 0):
        subprocess.run(["scancel", "--signal=KILL", running.step], capture_output=True, check=False)
    for pipe in (running.popen.stdin, running.popen.stdout):
        with suppress(BrokenPipeError):
            assert pipe is not None
            pipe.close()


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
