"""A model with a queue of keys as MoCo's (He et al. 2020, arXiv:1911.05722), and a norm of its own. argv: words.

Prints a line `seen NUMBER DIGEST` for the queue and its pointer as they are with each contribution of this rank.
`kill:N` ends this process by SIGKILL before its Nth step; `declared` names the norm's statistics.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import torch
from torch import nn

import paramserver

KEYS, DIM = 16, 8


class Scale(nn.Module):
    """Keeps a moving mean, as no layer of torch does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(inputs.detach().mean(0), 0.5)
        return inputs - self.mean


class Queue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm = Scale(), nn.BatchNorm1d(DIM, momentum=0.5)
        self.encoder = nn.Linear(DIM, DIM)
        self.register_buffer("queue", nn.functional.normalize(torch.randn(KEYS, DIM), dim=1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))
        self.register_buffer("age", torch.zeros(KEYS, dtype=torch.uint8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.encoder(self.norm(self.scale(inputs)))
        if self.training:
            at = int(self.pointer)
            self.queue[at] = nn.functional.normalize(inputs[0], dim=0)
            self.age[at] = (int(self.age[at]) + 3) % 256
            self.pointer.fill_((at + 1) % KEYS)
        return found @ self.queue.clone().T


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Of the queue and what belongs to it."""
    content = b"".join(tensors[name].contiguous().numpy().tobytes() for name in ("queue", "pointer", "age"))
    return hashlib.sha256(content).hexdigest()[:16]


def main() -> None:
    words = sys.argv[1:]
    dies_at = next((int(word.partition(":")[2]) for word in words if word.startswith("kill:")), -1)
    with paramserver.connect() as session:
        torch.manual_seed(0)
        model = Queue()
        chance = torch.Generator().manual_seed(100 * session.rank + session.group_rank + 1)
        declared = {"averaged_buffers": ["scale.mean"]} if "declared" in words else {}
        if "misspelt" in words:
            declared = {"averaged_buffers": ["scale.maen"]}
        optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01), **declared)
        while not session.is_done:
            if session.step == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            inputs = torch.randn(8, DIM, generator=chance) + 2.0 * session.rank
            model(inputs).square().mean().backward()
            session.record(num_samples=8)
            print("seen", session.step, digest(model.state_dict()), flush=True)
            optimizer.step()
        session.finish()
        print("end", digest(model.state_dict()), flush=True)


if __name__ == "__main__":
    main()
