"""What every trainer is given: a small model, data in a fixed order, and the cases."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

WORKERS, SAMPLES, BATCH, RATE = 2, 64, 8, 0.01  # BATCH: of a worker and step


@dataclass(frozen=True)
class Case:
    steps: int = 8  # of the run; 0: as many as its workers take
    own_steps: int = 8  # the trainer would take, those of its checkpoint included
    accumulate: int = 1
    clip: float = 0.0
    bf16: bool = False
    shuffle: bool = False
    saves: bool = False  # a checkpoint at the end
    loads: bool = False  # goes on from that
    cold_at: int = 0  # the checkpoint's step, where the run begins anew
    dies_before: int = 0  # this batch
    waits_before: int = 0  # this batch, for a file "back"

    @property
    def batch(self) -> int:
        return BATCH // self.accumulate

    @property
    def num_steps(self) -> int:
        """That a trainer counts in the end."""
        return min(self.own_steps, self.steps + self.cold_at) if self.steps else self.own_steps


CASES = {
    "plain": Case(),
    "clip": Case(clip=0.05),
    "accumulate": Case(accumulate=2),
    "bf16": Case(bf16=True),
    "more": Case(own_steps=100),
    "own": Case(steps=0),
    "fewer": Case(own_steps=6, steps=12),
    "shuffled": Case(steps=4, own_steps=4, shuffle=True),
    "first": Case(steps=4, own_steps=4, saves=True),
    "resume": Case(loads=True),
    "behind": Case(loads=True, cold_at=4, own_steps=12, dies_before=6),
    "behind-again": Case(loads=True, cold_at=4, own_steps=12),
    "cold": Case(loads=True, cold_at=4, steps=4),
    "first-mid": Case(steps=3, own_steps=3, saves=True),  # in the middle of an epoch
    "mid": Case(loads=True, cold_at=3, own_steps=12, dies_before=6),
    "mid-again": Case(loads=True, cold_at=3, own_steps=12),
    "killed": Case(steps=12, own_steps=12, accumulate=2, dies_before=11),
    "killed-again": Case(steps=12, own_steps=12, accumulate=2),
    "back": Case(waits_before=6),
    "back-again": Case(),
}


class Data(Dataset):
    """Dicts, as Hugging Face wants them."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64).to(dtype)
        self.labels = (self.x[:, :2].sum(1) > 0).long()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.labels[index], "index": torch.tensor(index)}


class Model(torch.nn.Module):
    """Knows what it was trained on."""

    def __init__(self, case: Case, dies: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
        self.to(torch.float32 if case.bf16 else torch.float64)
        self.seen: list[int] = []
        self.num_batches, self._dies_before = 0, case.dies_before if dies else 0
        self._waits_before = case.waits_before if dies else 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        self.num_batches += 1
        if self.num_batches == self._dies_before:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.num_batches == self._waits_before:
            Path("at").touch()
            while not Path("back").exists():
                time.sleep(0.01)
        self.seen += index.tolist()
        return {"loss": F.cross_entropy(self.layers(x).float() if x.dtype != torch.float64 else self.layers(x), labels)}


def optimizer_of(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def reference(case: Case) -> dict[str, torch.Tensor]:
    """By one plain process, of the union batch."""
    model, data = Model(case), Data(torch.float32 if case.bf16 else torch.float64)
    optimizer, scheduler = optimizer_of(model)
    size = WORKERS * case.batch
    for step in range(case.num_steps):
        if case.cold_at and step == case.cold_at:
            optimizer.state.clear()
        for number in range(step * case.accumulate, (step + 1) * case.accumulate):
            rows = [row % SAMPLES for row in range(number * size, (number + 1) * size)]
            with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
                loss = model(data.x[rows], data.labels[rows], torch.tensor(rows))["loss"]
            (loss / case.accumulate).backward()
        if case.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model.state_dict()


def loss_of(weights: dict[str, torch.Tensor]) -> float:
    """On all data."""
    model, data = Model(Case()), Data(torch.float64)
    model.load_state_dict(weights)
    return model(data.x, data.labels, torch.arange(SAMPLES))["loss"].item()


def play(train: Callable[[Case, Model, Data, Path, str], int]) -> None:
    """One case of the command line. `train` returns how many steps its trainer counts."""
    folder, rank, mode, name = Path(sys.argv[1]), *sys.argv[2:]
    case = CASES[name]
    model = Model(case, dies=rank == "1")
    num_steps = train(case, model, Data(torch.float32 if case.bf16 else torch.float64), folder / "checkpoint", mode)
    found = {"weights": model.state_dict(), "seen": model.seen, "steps": num_steps}
    torch.save(found, folder / f"{name}.{rank}.pt")
