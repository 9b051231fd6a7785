"""A task of your own: two interleaved half moons and a small network that tells them apart.

Any class with these four methods is a task; nothing is inherited, nothing of paramserver is imported.
Start a server and two workers, each in its own terminal, from the folder that holds examples/:

    ps-server --mode ssp
    ps-worker --rank 0 --task examples/my_task.py:MyTask
    ps-worker --rank 1 --task examples/my_task.py:MyTask

or all three with one command, and with an argument of the constructor below if you like:

    ps-launch -n 2 --task examples/my_task.py:MyTask
    ps-launch -n 2 --task examples/my_task.py:MyTask --set task.args.hidden=128
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset


class MyTask:
    # `hidden` and `num_samples` come from task.args, `seed` from the run: every worker must make the
    # same data, because each trains on its own part of it.
    def __init__(self, hidden: int = 64, num_samples: int = 4000, seed: int = 0) -> None:
        self.hidden = hidden
        points, labels = moons(num_samples, torch.Generator().manual_seed(seed))
        num_test = num_samples // 5
        self.train = TensorDataset(points[num_test:], labels[num_test:])
        self.test_points, self.test_labels = points[:num_test], labels[:num_test]

    # Called once per worker; the first worker's weights become the run's.
    def model(self) -> nn.Module:
        width = self.hidden
        return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))

    # Any map-style data set; each worker gets its share of the samples, shuffled anew every epoch.
    def train_data(self) -> Dataset:
        return self.train

    # One step: the batch is on the model's device. The mean over the batch, without backward().
    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        points, labels = batch  # (B, 2), (B,)
        return F.cross_entropy(model(points), labels)

    # Metrics to report, by name; "loss" must be among them.
    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        labels = self.test_labels.to(device)
        logits = model(self.test_points.to(device))  # (N, 2)
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        return {"loss": F.cross_entropy(logits, labels).item(), "accuracy": accuracy.item()}


def moons(num_samples: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points (N, 2) on two interleaved half circles, a little blurred, and labels (N,): which of the two."""
    labels = torch.randint(2, (num_samples,), generator=generator)
    angle = torch.pi * torch.rand(num_samples, generator=generator)
    upper = torch.stack([angle.cos(), angle.sin()], dim=1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], dim=1)
    points = torch.where(labels.bool().unsqueeze(1), lower, upper)
    return points + 0.1 * torch.randn(num_samples, 2, generator=generator), labels
