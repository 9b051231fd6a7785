"""Workers as tasks of a real Slurm job on three nodes, and the job script that users copy."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from paramserver.tests.engines.conftest import EngineRun, settings
from paramserver.tests.engines.slurm import SlurmCluster

ROOT = Path(__file__).parents[2]


def test_tasks_take_their_place_from_slurm(run: EngineRun, slurm_cluster: SlurmCluster) -> None:
    show = f"exec {sys.executable} -m paramserver.worker --print-config > shown-$SLURM_PROCID"
    process = run.program("srun", "srun", "-N3", "-n3", "sh", "-c", show, **slurm_cluster.env)
    assert process.wait() == 0, process.output
    for rank in ("0", "1", "2"):
        rows = settings((run.folder / f"shown-{rank}").read_text())
        assert rows["worker.rank"] == (rank, "environment SLURM_PROCID")
        assert rows["run.workers"] == ("3", "environment SLURM_STEP_NUM_TASKS")
        assert rows["worker.local_rank"] == ("0", "environment SLURM_LOCALID")
        assert rows["worker.server"] == (f"{slurm_cluster.nodes[0]}:50051", "environment SLURM_JOB_NODELIST")


@pytest.mark.slow
def test_the_job_script_trains_to_the_end(run: EngineRun, slurm_cluster: SlurmCluster) -> None:
    """examples/slurm.sbatch as it is, submitted for three nodes; only what it trains is the test's."""
    run.steps, run.num_workers = 20, 3
    samples = 3 * 20 * 4
    (run.folder / "run.yaml").write_text(
        f"task: {{name: ledger, args: {{samples: {samples}}}}}\n"
        "run: {mode: async, steps: 20, batch_size: 4}\noptimizer: {name: sgd, lr: 1}\n"
        f"output: {{summary: s.json, history: {run.history}}}\n"
    )
    path = f"{Path(sys.executable).parent}:{slurm_cluster.env['PATH']}"
    script = str(ROOT / "examples" / "slurm.sbatch")
    submitted = slurm_cluster.run(
        "sbatch", "--output=job.out", script, "run.yaml", env={**run.environ, "PATH": path}, cwd=run.folder
    )
    assert submitted.returncode == 0, submitted.stderr
    slurm_cluster.until(lambda: slurm_cluster.jobs() == [], "the job is over")
    output = (run.folder / "job.out").read_text()
    events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    places = sorted((event["rank"], event["workers"]) for event in events if event["event"] == "place")
    assert places == [(0, 3), (1, 3), (2, 3)], output
    run.prove()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_job_script_has_slurms_own_syntax(slurm_cluster: SlurmCluster) -> None:
    result = slurm_cluster.run("sbatch", "--test-only", str(ROOT / "examples" / "slurm.sbatch"))
    assert result.returncode == 0, result.stderr
