"""A small network in float64, on batches that (rank, step) say, 3 + 2 * rank samples each: a worker, and what a test
makes the reference of. argv: sgd|adamw, with -deep or -wide behind it or not, [WAIT_FILE STEP], as in onehot.py.
"""

import sys

import torch
from torch import nn


def make(inner: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)]
    if inner.endswith("-deep"):
        layers += [nn.Tanh(), nn.Linear(3, 3)]
    if inner.endswith("-wide"):  # codecs encode what is large
        layers = [nn.Linear(6, 800), nn.Tanh(), nn.Linear(800, 9), nn.Tanh(), nn.Linear(9, 3)]
    model = nn.Sequential(*layers).double()
    if inner.startswith("sgd"):
        return model, torch.optim.SGD(model.parameters(), lr=0.1)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def size(rank: int) -> int:
    return 3 + 2 * rank


def backward(model: nn.Module, rank: int, step: int) -> None:
    chance = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(size(rank), 6, generator=chance, dtype=torch.float64)
    targets = torch.randint(3, (size(rank),), generator=chance)
    model.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()


def main() -> None:
    import paramserver
    from paramserver.tests.gates import Gate

    (model, inner), gate = make(sys.argv[1]), Gate(*sys.argv[2:])
    with paramserver.connect() as session:
        optimizer = session.optimizer(model, inner)
        while not session.is_over():
            gate.wait(session.step)
            backward(model, session.rank, session.step)
            session.record(num_samples=size(session.rank))
            optimizer.step()


if __name__ == "__main__":
    main()
