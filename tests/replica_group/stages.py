"""A script whose model is a pipeline. argv: folder, name, and words: what it does.

What its model is in the end, of this process, is in FOLDER/NAME-INNER.pt.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch
import torch.distributed.pipelining  # which takes seconds to load
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paramserver

NUM_SAMPLES, WIDTH, NUM_LAYERS = 80, 6, 8
LARGE_WIDTH = 3536
LARGE_BYTES = 4 * NUM_LAYERS * LARGE_WIDTH**2  # 400 MB


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self._dropout = nn.Linear(WIDTH, WIDTH), dropout
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return inputs + torch.tanh(F.dropout(self.linear(inputs), self._dropout, self.training))


class Pair(nn.Module):
    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs, inputs


def make(words: tuple[str, ...] = ()) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Layer(0.2 if "dropout" in words else 0.0) for _ in range(NUM_LAYERS)]
    if "tied" in words:
        layers[-1].linear.weight = layers[0].linear.weight  # type: ignore[union-attr]
    if "tuple" in words:
        layers[3] = Pair()
    if "norm" in words:
        layers[3] = nn.BatchNorm1d(WIDTH)
    return nn.Sequential(*layers[: 1 if "few" in words else None])


def data() -> TensorDataset:
    chance = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=chance)
    return TensorDataset(inputs, inputs.roll(1, 1))


def optimizer_of(words: tuple[str, ...], model: nn.Module) -> torch.optim.Optimizer:
    if "sgd" in words:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.Adam(model.parameters(), lr=0.01)


def make_large() -> nn.Sequential:
    """Of LARGE_BYTES, on the meta device or not."""
    return nn.Sequential(*(nn.Linear(LARGE_WIDTH, LARGE_WIDTH, bias=False) for _ in range(NUM_LAYERS)))


def limit_memory() -> None:
    """This process may have less than the model more than it has now, and map a file of its weights."""
    most = memory("VmData") + int(1.95 * LARGE_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))


def memory(name: str) -> int:
    """Bytes of this process, as /proc/self/status has them."""
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) * 1024


def train_large(folder: Path, words: tuple[str, ...]) -> None:
    with paramserver.connect() as session:
        limit_memory()
        before = memory("VmHWM"), memory("RssFile")
        with torch.device("meta" if "meta" in words else "cpu"):
            layers = make_large()
        model = session.pipeline(layers, F.mse_loss, init=str(folder / "init.safetensors"))
        optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
        same = TensorDataset(torch.ones(8, LARGE_WIDTH), torch.zeros(8, LARGE_WIDTH))
        for inputs, targets in session.shard(same, batch_size=4, epochs=None):
            optimizer.zero_grad()
            model(inputs, targets)
            optimizer.step()
        session.finish()
    files = memory("RssFile") - before[1]  # a forked process maps them again, page by page
    print("peak", memory("VmHWM") - before[0] - files, flush=True)


def plain_step(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As plain torch accumulates the gradients of microbatches."""
    num, losses = int(os.environ["PS_WORKER__MICROBATCHES"]), []
    for part, target in zip(inputs.chunk(num), targets.chunk(num), strict=True):
        losses.append(F.mse_loss(model(part), target))
        (losses[-1] / num).backward()
    return torch.stack(losses).detach().mean()


def main() -> None:
    folder, name, *rest = sys.argv[1:]
    words = tuple(rest)
    if "large" in words:
        train_large(Path(folder), words)
        return
    with paramserver.connect() as session:
        module = make(words)
        example = next(iter(torch.utils.data.DataLoader(data(), 2))) if "measured" in words else None
        is_plain = "plain" in words
        model: nn.Module = module if is_plain else session.pipeline(module, F.mse_loss, example)
        optimizer = session.optimizer(model, optimizer_of(words, model))
        if "late" in words:
            session.pipeline(module, F.mse_loss)
        if "evaluates" in words:
            session.evaluate(lambda model: {"loss": float(F.mse_loss(model(data().tensors[0]), data().tensors[1]))}, 5)
        for inputs, targets in session.shard(data(), epochs=None, drop_last="uneven" not in words):
            optimizer.zero_grad()
            loss = plain_step(model, inputs, targets) if is_plain else model(inputs, targets)
            session.record(loss=float(loss))
            if "clips" in words:
                optimizer.clip_grad_norm(0.01)
            optimizer.step()
            print("step", session.step, float(loss), flush=True)
        session.finish()
        num_local = sum(parameter.numel() for parameter in model.parameters())
        print("parameters", num_local, "of", sum(item.numel() for item in make(words).parameters()), flush=True)
        torch.save(model.state_dict(), Path(folder) / f"{name}-{os.environ.get('RANK', '0')}.pt")


if __name__ == "__main__":
    main()
