"""As nanoGPT does it: tied weights, two parameter groups, AdamW, a cosine rate set by hand, gradients accumulated."""

import math
import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paramserver

STEPS, ACCUMULATE, BATCH = 12, 2, int(os.environ["BATCH"])
torch.manual_seed(0)
tokens = torch.randint(0, 20, (400, 9))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.norm = nn.LayerNorm(16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(torch.tanh(self.mix(self.embed(tokens)))))


def rate(step):
    return 1e-2 * min(1, (step + 1) / 4) * 0.5 * (1 + math.cos(math.pi * step / STEPS))


model = Model().double()
decayed = [p for p in model.parameters() if p.dim() >= 2]
plain = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]

with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)))
    batches = iter(session.shard(TensorDataset(tokens), batch_size=BATCH, epochs=100, accumulate=ACCUMULATE))
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        for _ in range(ACCUMULATE):
            (batch,) = next(batches)
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / ACCUMULATE
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if session.finish():
        torch.save(model.state_dict(), os.environ["OUT"])
