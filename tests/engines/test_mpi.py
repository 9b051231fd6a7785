"""Workers started by real MPI launchers: Open MPI, and MPICH for the PMI variables."""

from __future__ import annotations

import shutil
import sys

import pytest

from paramserver.tests.engines.conftest import EngineRun, settings

OPEN_MPI = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n")
MPICH = ("mpiexec.mpich", "-n")
WORKER = (sys.executable, "-m", "paramserver.worker")


def _needs(program: str, package: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"no {program}: apt-get install -y --no-install-recommends {package}")


@pytest.mark.parametrize(
    ("launcher", "package", "names"),
    [
        (OPEN_MPI, "openmpi-bin", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")),
        (MPICH, "mpich", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")),
    ],
    ids=["Open MPI", "MPICH"],
)
def test_workers_take_their_place_from_mpi(
    run: EngineRun, launcher: tuple[str, ...], package: str, names: tuple[str, str, str]
) -> None:
    _needs(launcher[0], package)
    # Each rank prints to a file of its own: two tables at once would be mixed.
    show = f"exec {' '.join(WORKER)} --print-config > shown-${names[0]}"
    process = run.program("mpi", *launcher, "2", "sh", "-c", show)
    assert process.wait() == 0, process.output
    for rank in ("0", "1"):
        rows = settings((run.folder / f"shown-{rank}").read_text())
        assert rows["worker.rank"] == (rank, f"environment {names[0]}")
        assert rows["run.workers"] == ("2", f"environment {names[1]}")
        assert rows["worker.local_rank"] == (rank, f"environment {names[2]}")
        assert rows["worker.server"] == ("127.0.0.1:50051", f"environment {names[1]}")


@pytest.mark.slow
def test_open_mpi_trains_to_the_end(run: EngineRun) -> None:
    _needs(OPEN_MPI[0], "openmpi-bin")
    server = run.serve("sync", 2, 20)
    mpi = run.program("mpi", *OPEN_MPI, "2", *WORKER, "--history", run.history, PS_SERVER=run.address)
    assert mpi.wait() == 0, mpi.output
    assert server.wait() == 0
    assert sorted(event["rank"] for event in mpi.events("place")) == [0, 1]
    run.prove()
