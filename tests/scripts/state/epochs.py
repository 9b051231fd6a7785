"""Epochs with a scheduler by the step, one by the epoch and one by the epoch's mean loss (or FED), dropout, BatchNorm,
an average of the weights; gradients accumulated over ACCUMULATE batches; waits for a file at GATE_AT of its batches."""

import os
import random

import torch
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import paramserver
from paramserver.tests.gates import Gate

ACCUMULATE = int(os.environ.get("ACCUMULATE", "1"))
DTYPE = torch.float32 if "SCALER" in os.environ else torch.float64
GATE = Gate(os.environ.get("GATE", ""), os.environ.get("GATE_AT", ""))

generator = torch.Generator().manual_seed(3)
x = torch.randn(78, 6, dtype=DTYPE, generator=generator)
y = x @ torch.randn(6, 1, dtype=DTYPE, generator=generator)
torch.manual_seed(0)
random.seed(int(os.environ["RANK"]))
model = torch.nn.Sequential(
    torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
).to(DTYPE)
model.register_buffer("epoch_loss", torch.zeros(2, dtype=DTYPE))  # sum and number
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
# One that finds infinities again and again: its scale is at the end of the range, and soon there again.
SCALER = {"init_scale": 2.0**127, "growth_interval": 3, "enabled": "SCALER" in os.environ}
large = torch.nn.Linear(*([600, 600] if "SCALER" in os.environ else [1, 1]))  # travels in pieces
noise = torch.Generator().manual_seed(5)

with paramserver.connect() as session:
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = session.optimizer(model, sgd, averaged_buffers=["epoch_loss"])
    scaler = session.scaler("cpu", **SCALER)
    by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=0.5)
    session.state(
        by_step=by_step, by_epoch=by_epoch, plateau=plateau, optimizer=optimizer, ema=ema, scaler=scaler, noise=noise,
        large=large, rng=True,
    )  # fmt: skip
    if not session.resumed:
        large.weight.data.add_(1)
    print(f"resumed {session.resumed} at {session.step} in {session.epoch}", flush=True)
    num_batches, steps = 0, []
    for epoch in session.epochs(5):
        batches = session.shard(TensorDataset(x, y), batch_size=4, accumulate=ACCUMULATE)
        num = len(batches)
        for number, (inputs, wanted) in enumerate(batches, 1):
            GATE.wait(num_batches)
            num_batches += 1
            jitter = torch.randn((), generator=noise) * random.random()
            loss = F.mse_loss(model(inputs * (1 + 0.01 * jitter)), wanted)
            model.epoch_loss += torch.stack((loss.detach(), torch.ones_like(loss)))
            scaler.scale(loss / ACCUMULATE).backward()
            if number % ACCUMULATE == 0 or not batches.remaining:
                before = session.step
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                by_step.step()
                ema.update_parameters(model)
                steps += [session.step] if session.step > before else []
        if "GOES_BACK" not in os.environ:
            assert len(batches) == num and session.epoch == epoch, (epoch, num)
            assert not batches.remaining or session.is_done, (epoch, batches.remaining)
        by_epoch.step()
        mean = float(model.epoch_loss[0] / model.epoch_loss[1])
        plateau.step(float(os.environ.get("FED", mean)))
        model.epoch_loss.zero_()
        print(f"epoch {epoch} of {num} batches, step {session.step}", flush=True)
    assert "GOES_BACK" in os.environ or steps == list(range(steps[0], steps[0] + len(steps))), steps
    session.finish()
    found = {"model": model.state_dict(), "ema": ema.state_dict(), "large": large.state_dict()}
    found |= {"lr": by_step.get_last_lr(), "scale": scaler.get_scale(), "best": plateau.best}
    torch.save(found, os.environ["OUT"])
