"""examples/my_task.py does what its first lines promise."""

from __future__ import annotations

from pathlib import Path

import torch

from paramserver.worker.training.tasks.loading import load_task

EXAMPLE = Path(__file__).parents[3] / "examples" / "my_task.py"


def test_the_example_learns_with_the_default_optimizer():
    task = load_task(f"{EXAMPLE}:MyTask", {"hidden": 64}, seed=0, device=torch.device("cpu"))
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    data = task.train_data()
    for _ in range(600):
        optimizer.zero_grad()
        task.loss(model, data[torch.randint(len(data), (32,), generator=generator)]).backward()
        optimizer.step()
    assert task.evaluate(model)["accuracy"] > 0.97
