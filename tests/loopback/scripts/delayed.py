"""Gradient descent on a parabola of the rank's own, 0.5 * (rank + 1) * (w - rank)^2, at lr 0.1 and in float64.

Prints the weights at the start of every step.
"""

import torch

import paramserver

model = torch.nn.Module()
model.w = torch.nn.Parameter(torch.full((3,), 10.0, dtype=torch.float64))
num_steps = 0
with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    while not session.is_done:
        print("before step", num_steps, model.w[0].item().hex(), flush=True)
        model.w.grad = (session.rank + 1) * (model.w.detach() - session.rank)
        session.record(num_samples=1)
        optimizer.step()
        num_steps += 1
    session.finish()
print("at the end", num_steps, model.w[0].item().hex(), flush=True)
