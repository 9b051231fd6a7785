"""What a job has not chosen: the folder and its files, the locale, what a script has changed in torch."""

from __future__ import annotations

import pytest

from paramserver.tests.cluster import Cluster

# The model and the data are on the CPU; every other tensor that torch creates has no memory.
ON_ANOTHER_DEVICE = """
import torch
torch.set_default_device("meta")
import paramserver
session = paramserver.connect()
model = torch.nn.Sequential(torch.nn.Linear(4, 8, device="cpu"), torch.nn.Linear(8, 1, device="cpu"))
optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.05))
x = torch.linspace(-1, 1, 256, device="cpu").view(64, 4)
class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return x[i]
for batch in session.shard(Data(), batch_size=8):
    optimizer.zero_grad()
    loss = model(batch).pow(2).mean()
    loss.backward()
    optimizer.step()
    session.record(loss=float(loss))
session.finish()
assert all(item.device.type == "cpu" for item in model.state_dict().values())
"""


@pytest.mark.parametrize(
    "flags", [("sync",), ("allreduce",), ("diloco", "--local-steps", "2"), ("async", "--set", "worker.codec=topk")]
)
def test_a_default_device_of_the_script_changes_nothing_of_ours(cluster: Cluster, flags: tuple[str, ...]) -> None:
    (cluster.folder / "train.py").write_text(ON_ANOTHER_DEVICE)
    done = cluster.command("launch", "-n", "2", "--max-restarts", "0", "--mode", *flags, "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
