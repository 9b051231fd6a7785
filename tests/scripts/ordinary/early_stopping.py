"""Epochs over a DataLoader of one's own, a DistributedSampler, a StepLR by the epoch, until the loss on held-out data
has not been better for two of them; the loop is left by `break`, and its length of 400 steps is never reached."""

import copy
import os

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paramserver

BATCH, PATIENCE = int(os.environ["BATCH"]), 2
torch.manual_seed(0)
x = torch.randn(60, 20, dtype=torch.float64)
y = (x[:, 0] + torch.randn(60, dtype=torch.float64) > 0).long()
train, held_out = TensorDataset(x[:40], y[:40]), (x[40:], y[40:])
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 2)).double()

with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.NAdam(model.parameters(), lr=0.02))
    sampler = DistributedSampler(train, session.num_workers, session.rank, seed=3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.98)
    best, best_state, waited = float("inf"), None, 0
    for epoch in range(200):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(train, BATCH, sampler=sampler):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            session.record(loss=loss.item(), num_samples=len(labels))
            optimizer.step()
        scheduler.step()
        with torch.no_grad():
            loss = F.cross_entropy(model(held_out[0]), held_out[1]).item()
        if loss < best:
            best, best_state, waited = loss, copy.deepcopy(model.state_dict()), 0
        elif (waited := waited + 1) >= PATIENCE:
            break
    assert epoch < 100, "it has been stopped early"
    if session.finish():
        torch.save({"epochs": torch.tensor(epoch), **best_state}, os.environ["OUT"])
