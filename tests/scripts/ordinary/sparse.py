"""An embedding whose gradient is sparse, and SGD."""

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paramserver

STEPS, BATCH = 10, int(os.environ["BATCH"])
torch.manual_seed(0)
words = torch.randint(0, 50, (200, 4))
y = (words.sum(1) > 98).long()
model = nn.Sequential(nn.EmbeddingBag(50, 8, mode="mean", sparse=True), nn.Linear(8, 2)).double()

with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5))
    batches = iter(session.shard(TensorDataset(words, y), batch_size=BATCH, epochs=100))
    for _ in range(STEPS):
        inputs, labels = next(batches)
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if session.finish():
        torch.save(model.state_dict(), os.environ["OUT"])
