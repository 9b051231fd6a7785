"""A worker's place as engines say it: whose word counts, and where the server is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.common.config.launchers import ENGINES, engine_settings, first_host
from paramserver.common.config.sources import LAUNCHER_ENV_NAMES, load_config
from paramserver.common.errors import UsageError

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "node1", "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
SLURM = {
    "SLURM_PROCID": "4", "SLURM_NTASKS": "6", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-09]", "SLURM_NNODES": "3",
}  # fmt: skip
KUBERNETES = {"JOB_COMPLETION_INDEX": "3", "PS_RUN__WORKERS": "4"}


def placement(environ: dict[str, str], **flags: Any) -> dict[str, Any]:
    """What a worker makes of an environment, and whose word it was."""
    resolved = load_config(None, {key.replace("__", "."): value for key, value in flags.items()}, [], environ)
    worker = resolved.config.worker
    return {
        "rank": worker.rank,
        "workers": resolved.config.run.workers,
        "local_rank": worker.local_rank,
        "server": worker.server,
        "from": resolved.origins.get("worker.server", "default"),
    }


@pytest.mark.parametrize(
    ("environ", "rank", "workers", "local_rank", "server", "origin"),
    [
        (TORCHRUN, 5, 8, 1, "node1:50051", "environment MASTER_ADDR"),
        (OPEN_MPI, 2, 3, 2, "127.0.0.1:50051", "environment OMPI_COMM_WORLD_SIZE"),
        (MPICH, 1, 2, 0, "127.0.0.1:50051", "environment PMI_SIZE"),
        (SLURM, 4, 6, 1, "gpu07:50051", "environment SLURM_JOB_NODELIST"),
        (KUBERNETES, 3, 4, None, "127.0.0.1:50051", "default"),
        ({}, None, None, None, "127.0.0.1:50051", "default"),
    ],
    ids=["torchrun", "Open MPI", "MPICH", "Slurm", "Kubernetes", "none"],
)
def test_an_engine_gives_all_of_a_place(
    environ: dict[str, str], rank: int, workers: int, local_rank: int, server: str, origin: str
) -> None:
    assert placement(environ) == {
        "rank": rank, "workers": workers, "local_rank": local_rank, "server": server, "from": origin
    }  # fmt: skip


# ---- several engines at once -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "engine", "rank", "workers", "overruled"),
    [
        (TORCHRUN | SLURM, "torchrun", 5, 8, ("Slurm",)),
        (TORCHRUN | KUBERNETES, "torchrun", 5, 8, ("Kubernetes",)),
        (TORCHRUN | OPEN_MPI | SLURM, "torchrun", 5, 8, ("Open MPI", "Slurm")),
        (OPEN_MPI | SLURM, "Open MPI", 2, 3, ("Slurm",)),  # mpirun's own daemons are Slurm tasks
        (MPICH | SLURM, "PMI", 1, 2, ("Slurm",)),
        (SLURM | KUBERNETES, "Slurm", 4, 6, ("Kubernetes",)),
        (TORCHRUN | SLURM | {"RANK": ""}, "Slurm", 4, 6, ()),
    ],
)
def test_the_innermost_engine_gives_everything(
    environ: dict[str, str], engine: str, rank: int, workers: int, overruled: tuple[str, ...]
) -> None:
    found = engine_settings(environ)
    assert (found.engine, found.overruled) == (engine, overruled)
    assert found.settings["worker.rank"].value == str(rank)
    assert found.settings["run.workers"].value == str(workers)


def test_a_rank_never_meets_another_engines_number_of_workers() -> None:
    """RANK set by hand in a job of 6 tasks is not one of these 6."""
    assert placement({"RANK": "9"} | SLURM)["rank"] == 9
    assert placement({"RANK": "9"} | SLURM)["workers"] is None


def test_srun_with_pmi2_still_says_the_rank_on_the_host() -> None:
    assert placement({"PMI_RANK": "4", "PMI_SIZE": "6"} | SLURM)["local_rank"] == 1


def test_the_step_counts_and_not_the_job() -> None:
    """`srun -n 2` within a job of 6 tasks."""
    assert placement(SLURM | {"SLURM_STEP_NUM_TASKS": "5"})["workers"] == 5
    assert placement({name: text for name, text in SLURM.items() if name != "SLURM_STEP_NUM_TASKS"})["workers"] == 6


def test_a_shell_within_an_allocation_is_no_worker_of_it() -> None:
    """salloc gives its shell SLURM_NTASKS and no SLURM_PROCID."""
    assert placement({"SLURM_NTASKS": "6", "SLURM_JOB_NODELIST": "n[1-3]"}) == placement({})


def test_a_number_of_workers_alone_still_counts() -> None:
    assert placement({"WORLD_SIZE": "4"}) == placement({}) | {"workers": 4}


def test_restarts_are_torchruns() -> None:
    assert engine_settings(TORCHRUN).restarts == "2"
    assert engine_settings(SLURM | {"TORCHELASTIC_RESTART_COUNT": "2"}).restarts == ""


# ---- where the server is ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "server"),
    [
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "127.0.0.1:50051"),  # all on this host, whatever MASTER_ADDR says
        (TORCHRUN | {"MASTER_ADDR": "fd00::1"}, "[fd00::1]:50051"),
        (TORCHRUN | {"MASTER_ADDR": ""} | {"SLURM_JOB_NODELIST": "a,b"}, "a:50051"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.7"}, "10.0.0.7:50051"),  # by hand, or PyTorchJob
        (SLURM | {"MASTER_ADDR": "node1"}, "node1:50051"),
        (SLURM | {"SLURM_JOB_NODELIST": "gpu07"}, "127.0.0.1:50051"),
        (SLURM | {"SLURM_JOB_NODELIST": "gpu07", "MASTER_ADDR": "gpu07"}, "127.0.0.1:50051"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"} | {"SLURM_JOB_NODELIST": "n[3,1]"}, "n3:50051"),
        (TORCHRUN | SLURM, "node1:50051"),
    ],
)
def test_the_server_is_on_the_first_host(environ: dict[str, str], server: str) -> None:
    assert placement(environ)["server"] == server


@pytest.mark.parametrize(
    "environ", [{"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "node1"}, KUBERNETES]
)
def test_one_process_may_train_alone(environ: dict[str, str]) -> None:
    """`RANK=0 python script.py` without a server is a run of one; several workers are never silently alone."""
    assert placement(environ)["from"] == "default"


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu[20,07-12]", "gpu20"), ("rack[1-2]node[3-4],x", "rack1node3"), ("vm,vm-[2-3]", "vm"), ("n[001]", "n001"),
        (" n1 ", "n1"), ("", ""),
    ],
)  # fmt: skip
def test_the_first_of_a_host_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@given(
    st.lists(st.from_regex(r"[a-z]{1,4}[0-9]{0,3}(-[a-z])?", fullmatch=True), min_size=1),
    st.integers(0, 999),
    st.integers(1, 3),
)
def test_a_range_in_the_first_name_begins_with_its_first_number(names: list[str], number: int, width: int) -> None:
    assert first_host(",".join(names)) == names[0]
    first = f"{number:0{width}d}"
    assert first_host(f"a[{first}-{number + 2:0{width}d},1000]-b," + ",".join(names)) == f"a{first}-b"


# ---- who is told, and mistakes ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        (TORCHRUN | {"RANK": "8"}, "(worker.rank: environment RANK, run.workers: environment WORLD_SIZE)"),
        (SLURM | {"SLURM_PROCID": "6"}, "(worker.rank: environment SLURM_PROCID, run.workers: environment SLURM_STEP"),
        (KUBERNETES | {"PS_RUN__WORKERS": "3"}, "JOB_COMPLETION_INDEX, run.workers: environment PS_RUN__WORKERS)"),
    ],
)
def test_a_rank_beyond_the_workers_says_who_said_what(environ: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        placement(environ)
    assert caught.value.exit_code == 2
    assert "worker.rank is " in caught.value.message and says in caught.value.message


def test_programs_that_are_no_workers_have_no_place() -> None:
    """`srun -n 1 ps-server` is not the one worker of the run."""
    environ = TORCHRUN | OPEN_MPI | MPICH | SLURM | KUBERNETES | {"PS_SERVER": "node1:1"}
    resolved = load_config(None, {}, [], environ, is_worker=False)
    assert (resolved.config.run.workers, resolved.config.worker.rank) == (4, None)  # PS_RUN__WORKERS is everyone's
    assert resolved.config.worker.server == "node1:1"


def test_a_launcher_keeps_every_rank_from_its_children() -> None:
    for engine in ENGINES:
        assert {engine.rank, *engine.workers, *engine.local_rank, *engine.local_workers} <= LAUNCHER_ENV_NAMES
    assert "PS_SERVER" in LAUNCHER_ENV_NAMES
    assert "MASTER_ADDR" not in LAUNCHER_ENV_NAMES
