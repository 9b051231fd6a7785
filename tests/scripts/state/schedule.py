"""A learning rate that follows HOW. One process of it waits for ever after GATE_AT steps, to be killed there."""

import math
import os

import torch
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import paramserver
from paramserver.tests.gates import Gate

HOW, GATE = os.environ["HOW"], Gate("never", os.environ.get("GATE_AT", ""))
STEPS = 16

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
if HOW == "inner":
    scheduler = lr_scheduler.StepLR(inner, step_size=2, gamma=0.5)
with paramserver.connect() as session:
    optimizer = session.optimizer(model, inner)
    if HOW in ("cosine", "registered", "epochs"):
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    if HOW == "plateau":
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    if HOW == "registered":
        session.state(scheduler=scheduler)
    if HOW == "warm-up":
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda _: min(1, (session.step + 1) / STEPS))
    count = 0
    for _ in session.epochs(1) if HOW == "epochs" else [0]:
        for (x,) in session.shard(TensorDataset(torch.randn(256, 4)), batch_size=4):
            GATE.wait(count)
            if HOW == "counter":
                optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * count / STEPS))
            if HOW == "by hand" and count == 2:
                optimizer.param_groups[0]["lr"] = 0.02
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            count += 1
            if HOW == "plateau":
                scheduler.step(1.0)
            elif HOW in ("cosine", "inner", "registered", "warm-up", "epochs"):
                scheduler.step()
    print(f"finished at {session.step} with rate {optimizer.param_groups[0]['lr']}")
    session.finish()
