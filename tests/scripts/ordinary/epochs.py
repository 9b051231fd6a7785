"""Epochs over a DataLoader of one's own, a DistributedSampler, momentum and a StepLR by the epoch."""

import os

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paramserver

EPOCHS, BATCH = 4, int(os.environ["BATCH"])
torch.manual_seed(0)
x = torch.randn(240, 10, dtype=torch.float64)
y = (x[:, :3].sum(1) > 0).long()
data = TensorDataset(x, y)
model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)).double()

with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    sampler = DistributedSampler(data, session.num_workers, session.rank, seed=3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(data, BATCH, sampler=sampler):
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            session.record(loss=loss.item(), num_samples=len(labels))
            optimizer.step()
        scheduler.step()
    if session.finish():
        torch.save(model.state_dict(), os.environ["OUT"])
