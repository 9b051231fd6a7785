"""A script that evaluates while it trains, with all that an evaluation might disturb.

The metric is a sum of weights, so that whoever has them can say which they were. In the environment: EVERY (none:
it does not evaluate), SAVE (where rank 0 writes its final weights).
"""

import os

import torch
from torch.utils.data import TensorDataset

import paramserver

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
)
session = paramserver.connect()
optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.05))
x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))


def evaluate(found: torch.nn.Module) -> dict[str, float]:
    found.train()  # a mistake that must not matter
    found(torch.randn(8, 4))
    total = sum(parameter.double().sum().item() for parameter in found.parameters())
    print(f"rank {session.rank} evaluates", flush=True)
    return {"total": total, "loss": abs(total)}


if "EVERY" in os.environ:
    session.evaluate(evaluate, every=os.environ["EVERY"])
for inputs, wanted in session.shard(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, epochs=4):
    loss = (model(inputs) - wanted).square().mean() + 0 * torch.rand(())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
session.finish()
if "SAVE" in os.environ and session.rank == 0:
    torch.save(model.state_dict(), os.environ["SAVE"])
