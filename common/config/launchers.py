"""Reads a worker's rank from the engine that started it: torchrun, Slurm, MPI, Kubernetes. Pure.

All settings (rank, number of workers, rank on its host, server) come from one engine, so a rank is never combined with
another engine's number of workers. That engine is the first in `ENGINES` whose rank is set. An engine that can run
inside another one comes first, so torchrun inside a Slurm job counts as torchrun. The values are text here, and
`sources.py` checks them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .addresses import join_address
from .schema import DEFAULT_ADDRESS, DEFAULT_PORT


@dataclass(frozen=True)
class Engine:
    """Names of an engine's environment variables. Of several names, the first that is set counts."""

    name: str
    rank: str
    workers: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_workers: tuple[str, ...] = ()  # on this host

    @property
    def variables(self) -> set[str]:
        return {self.rank, *self.workers, *self.local_rank, *self.local_workers}


_MPI = "OMPI_COMM_WORLD"
ENGINES = (
    # People also set these variables by hand.
    Engine("torchrun", "RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    Engine("Open MPI", f"{_MPI}_RANK", (f"{_MPI}_SIZE",), (f"{_MPI}_LOCAL_RANK",), (f"{_MPI}_LOCAL_SIZE",)),
    # MPICH, Intel MPI, and srun --mpi=pmi2, which does not set MPI_LOCALRANKID.
    Engine("PMI", "PMI_RANK", ("PMI_SIZE",), ("MPI_LOCALRANKID", "SLURM_LOCALID"), ("MPI_LOCALNRANKS",)),
    # The number of tasks of the job step; in a batch script, of the job.
    Engine("Slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",)),
    # An indexed job has no variable for the number of workers: set PS_RUN__WORKERS.
    Engine("Kubernetes", "JOB_COMPLETION_INDEX"),
)

# Variables of a process's own rank. Names of hosts are not included, because a child process may need them.
RANK_VARIABLES = frozenset(name for engine in ENGINES for name in engine.variables)
_HOSTS = "SLURM_JOB_NODELIST"


@dataclass(frozen=True)
class Variable:
    """The value of a setting, and the environment variable it comes from."""

    value: str
    name: str


@dataclass(frozen=True)
class EngineSettings:
    """Settings by dotted key, the engine that gave them, and other engines whose rank was ignored."""

    settings: Mapping[str, Variable]
    engine: str = ""
    overruled: tuple[str, ...] = ()
    restarts: str = ""  # how often torchrun has started its workers again


def engine_settings(environ: Mapping[str, str], is_group: bool = False) -> EngineSettings:
    """Return the settings that an engine gives this process, or no settings if no engine started it.

    `is_group`: torchrun started the process as a member of a replica group. The rank of the group then comes from the
    engine around torchrun.
    """
    torchrun = ENGINES[0]
    if is_group:  # RANK and WORLD_SIZE count members of the group, so an outer engine gives the rank
        outer = engine_settings({name: value for name, value in environ.items() if name not in torchrun.variables})
        settings = dict(outer.settings)
        if environ.get(torchrun.rank):
            settings.setdefault("worker.server", Variable(DEFAULT_ADDRESS, torchrun.workers[0]))
        if (local_rank := _first(environ, torchrun.local_rank)) is not None:
            settings["worker.local_rank"] = local_rank
        return replace(outer, settings=settings)
    present = [engine for engine in ENGINES if environ.get(engine.rank)]
    if not present:  # a number of workers without a rank is still used
        workers = _first(environ, torchrun.workers)
        return EngineSettings({"run.workers": workers} if workers else {})
    engine = present[0]
    found = {
        "worker.rank": _first(environ, (engine.rank,)),
        "run.workers": _first(environ, engine.workers),
        "worker.local_rank": _first(environ, engine.local_rank),
        "worker.server": _server(environ, engine),
    }
    return EngineSettings(
        settings={key: variable for key, variable in found.items() if variable is not None},
        engine=engine.name,
        overruled=tuple(other.name for other in present[1:]),
        restarts=environ.get("TORCHELASTIC_RESTART_COUNT", "") if engine is torchrun else "",
    )


def _server(environ: Mapping[str, str], engine: Engine) -> Variable | None:
    """Return the default address of the server: the first host, or this host if all workers run here.

    Returns None if the worker may be the only one. A script without a server then trains alone.
    """
    workers = _first(environ, engine.workers)
    if workers is None or workers.value == "1":
        return None
    local, hosts = _first(environ, engine.local_workers), environ.get(_HOSTS, "")
    is_one_host = engine.name == "Slurm" and hosts and first_host(hosts) == hosts
    if not is_one_host and (local is None or local.value != workers.value):
        if environ.get("MASTER_ADDR"):
            return Variable(join_address(environ["MASTER_ADDR"], DEFAULT_PORT), "MASTER_ADDR")
        if hosts:
            return Variable(join_address(first_host(hosts), DEFAULT_PORT), _HOSTS)
    return Variable(DEFAULT_ADDRESS, workers.name)


def first_host(hosts: str) -> str:
    """Return the first host of a Slurm host list: gpu07 for `gpu[07-12,20],login`."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])*", hosts.strip())
    assert first is not None  # it matches the empty text
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> Variable | None:
    return next((Variable(environ[name], name) for name in names if environ.get(name)), None)
