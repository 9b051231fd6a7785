"""A training script of your own, in every mode: three lines differ from a script for one process.

    python examples/own_script.py                                   alone, no server
    ps-launch -n 4 --mode sync examples/own_script.py      and async, ssp, localsgd
    PS_SERVER=10.0.0.1:50051 RANK=0 python examples/own_script.py   by hand, on any machine

The model is the one of the built-in task `digits`, so the two can be compared.
"""

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paramserver

# The data: 1797 real 8x8 digits, a fifth of them held out; the same split in every process.
digits = load_digits()
images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)  # (N, 1, 8, 8)
labels = torch.from_numpy(digits.target).long()
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1797))
test, train = order[:359], order[359:]

torch.manual_seed(0)  # all ranks begin with the same weights
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
    torch.nn.Flatten(), torch.nn.Linear(256, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10),
)  # fmt: skip

with paramserver.connect() as session:  # 1: the run, its server found in the environment
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = session.optimizer(model, optimizer)  # 2: step() now does what the run's mode needs
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=200, gamma=0.3)
    session.state(scheduler=scheduler)  # optional: it goes on where it was when this worker is replaced or resumed
    # 3: this rank's share; 12 epochs, unless the run says otherwise (--epochs, --steps)
    for x, y in session.shard(TensorDataset(images[train], labels[train]), batch_size=32, epochs=12):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        session.record(loss=loss.item())  # optional: for the live view
        optimizer.step()
        scheduler.step()

    if session.finish():  # optional: the run's final weights; True for the one worker that evaluates them
        with torch.no_grad():
            logits = model(images[test])
        accuracy = (logits.argmax(1) == labels[test]).float().mean().item()
        session.report(loss=F.cross_entropy(logits, labels[test]).item(), accuracy=accuracy)
        print(f"held-out accuracy {accuracy:.3f}")
