"""What is on record of runs that ps-launch started: what their workers ran, and no setting in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramserver.catalog.showing import labels_of
from paramserver.common.runstore.reading import RunStore, config_differences
from paramserver.tests.cluster import Cluster

SCRIPT = """
import sys, torch, paramserver
session = paramserver.connect()
session.config(rate=float(sys.argv[1]))
model = torch.nn.Linear(2, 1)
optimizer = session.optimizer(model, torch.optim.Adam(model.parameters(), lr=float(sys.argv[1])))
data = torch.utils.data.TensorDataset(torch.ones(32, 2))
for (x,) in session.shard(data, batch_size=4, epochs=1):
    optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
session.finish()
"""


@pytest.mark.slow
def test_a_script_and_a_task_are_on_record_as_they_ran(cluster: Cluster, tmp_path: Path) -> None:
    (cluster.folder / "own.py").write_text(SCRIPT)
    for arguments in (["--seeds", "2", "--name", "two", "--", "0.25"], ["--note", "why", "--", "0.5"]):
        done = cluster.command("launch", "-n", "1", "--script", "own.py", "--mode", "ssp", *arguments)
        assert done.returncode == 0, done.stderr
    done = cluster.command("launch", "-n", "2", "--task", "xor", "--mode", "sync", "--steps", "3", "--lr", "0.125")
    assert done.returncode == 0, done.stderr
    with RunStore(cluster.folder / "runs" / "paramserver.db") as store:
        task, other, *seeds = store.runs()
        configs = {run.key: store.config(run) for run in (task, other, *seeds)}
        script = configs[other.key]
        assert (script["script"]["path"], script["script"]["arguments"]) == ("own.py", "0.5")
        assert (script["optimizer"]["name"], script["optimizer"]["lr"]) == ("Adam", 0.5)
        assert (script["run"]["batch_size"], script["config"], script["policy"]["staleness"]) == (4, {"rate": 0.5}, 3)
        assert "task" not in script and "loader" not in script and script["launch"]["group"] == 1
        assert (other.work, other.label, other.note) == ("script own.py", f"own-ssp-{other.key}", "why")
        assert sorted(run.name or "" for run in seeds) == ["two-ssp-seed0", "two-ssp-seed1"]
        found = configs[task.key]
        assert (found["task"]["name"], found["optimizer"]["name"], found["optimizer"]["lr"]) == ("xor", "SGD", 0.125)
        assert found["run"]["batch_size"] == 32 and "script" not in found
        differs = config_differences(configs[run.key] for run in (other, *seeds))
    unnamed = [run.model_copy(update={"name": None}) for run in (other, *seeds)]
    relevant = {key: values for key, values in differs.items() if not key.startswith("output.")}
    assert set(relevant) == {"run.seed", "script.arguments", "optimizer.lr", "config.rate"}
    alone, first, second = labels_of(unnamed, relevant)
    assert first == second != alone, "two seeds, and another rate"
