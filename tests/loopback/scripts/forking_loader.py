"""Batches from two forked loader processes, several short epochs."""

import torch
from torch.utils.data import Dataset

import paramserver


class Numbers(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


if __name__ == "__main__":
    model = torch.nn.Linear(1, 1)
    with paramserver.connect() as session:
        optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=1e-5))
        for batch in session.shard(Numbers(), batch_size=8, epochs=None, num_workers=2):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        session.finish()
