"""The session is made at the top level, the training is guarded, and the loader's workers are spawned."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import paramserver

session = paramserver.connect()
model = torch.nn.Linear(4, 1)
if sys.argv[1:] == ["used"]:  # by the child, too
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))


def main() -> None:
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = DataLoader(TensorDataset(torch.ones(32, 4)), batch_size=8, num_workers=1, multiprocessing_context="spawn")
    for (inputs,) in session.shard(loader):
        optimizer.zero_grad()
        model(inputs).mean().backward()
        optimizer.step()
    session.finish()
    print("steps", session.step, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["used"]:
        from torch.multiprocessing import spawn

        spawn(print, nprocs=1)
    main()
