"""Short epochs with two forked loader processes each. argv: epochs' batches are run.steps / epochs.

Prints the processes of its loaders, so that a test can see what becomes of them.
"""

import os
import sys

import torch
from torch.utils.data import Dataset

import paramserver

BATCHES = 3  # an epoch


class Numbers(Dataset):
    def __init__(self, num_workers: int) -> None:
        self.length = 4 * BATCHES * num_workers

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), float(os.getpid())])


if __name__ == "__main__":
    model = torch.nn.Linear(1, 1)
    seen: set[int] = set()
    with paramserver.connect() as session:
        optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=1e-5))
        for batch in session.shard(Numbers(int(sys.argv[1])), batch_size=4, epochs=None, num_workers=2):
            loaders = {int(pid) for pid in batch[:, 1]}
            if not loaders <= seen:
                seen |= loaders
                print("loaders", len(seen), *loaders, flush=True)
            optimizer.zero_grad()
            model(batch[:, :1]).square().mean().backward()
            optimizer.step()
        session.finish()
