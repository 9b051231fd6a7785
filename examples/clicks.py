"""Predicting clicks with an embedding table that no worker holds: ten million rows live on the server.

    ps-launch -n 2 --mode sync --steps 300 examples/clicks.py
    ps-launch -n 4 --mode async --steps 150 --shards 2 examples/clicks.py     half of the table each
    ROWS=1000000 python examples/clicks.py                                            alone, the table here

The clicks are generated: a user, an item, a page and an advertiser, some of them seen often and most hardly ever, have
hidden tastes that add up to the probability of a click. Each worker says what it sent and received a step, and how much
memory it took at most; a worker that held the table would send its gradient and receive its rows, all of them.
"""

import os
import resource

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paramserver

ROWS, DIM, FIELDS = int(os.environ.get("ROWS", "10_000_000")), 16, 4


def clicks(number: int, seed: int) -> TensorDataset:
    """Ids [number, FIELDS] as a power law has them, spread over the table, and whether there was a click."""
    generator = torch.Generator().manual_seed(seed)
    popular = ROWS ** torch.rand(number, FIELDS, generator=generator, dtype=torch.float64)
    ids = popular.long() * 2_654_435_761 % ROWS
    tastes = ((ids * 40_503 + 12_345) % 65_536).double() / 65_536 - 0.5  # of each id, -0.5 to 0.5
    probability = torch.sigmoid(5 * tastes.sum(1) - 0.5)
    return TensorDataset(ids, (torch.rand(number, generator=generator) < probability).float())


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """How often a click has a higher score than no click."""
    order = scores.argsort().argsort().double() + 1
    clicked = int(labels.sum())
    return ((order[labels > 0].sum() - clicked * (clicked + 1) / 2) / (clicked * (len(labels) - clicked))).item()


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(FIELDS * DIM, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
with paramserver.connect() as session:
    table = session.rows("ids", ROWS, DIM, optimizer="adagrad", lr=0.1, init_std=0.05)
    optimizer = session.optimizer(model, torch.optim.Adam(model.parameters(), lr=2e-3))

    def predict(ids: torch.Tensor) -> torch.Tensor:
        return model(table(ids).flatten(1)).squeeze(1)

    first, count = None, 0
    for ids, labels in session.shard(clicks(650_000, seed=1), batch_size=1024):
        loss = F.binary_cross_entropy_with_logits(predict(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        session.record(loss=loss.item())
        optimizer.step()
        first, count = first or loss.item(), count + 1

    whole = ROWS * DIM * 4
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"rank {session.rank}: a step sent {table.num_sent / max(1, count) / 1e6:.2f} MB of rows and received "
        f"{table.num_received / max(1, count) / 1e6:.2f} MB; the table has {whole / 1e6:.0f} MB, this process took "
        f"{peak / 1e6:.0f} MB at most"
    )
    if session.finish():
        held_out = clicks(50_000, seed=2)
        with torch.no_grad():
            scores, labels = predict(held_out.tensors[0]), held_out.tensors[1]
        loss = F.binary_cross_entropy_with_logits(scores, labels).item()
        session.report(loss=loss, auc=auc(scores, labels))
        print(f"log loss {first:.3f} in the first batch, {loss:.3f} held out; AUC {auc(scores, labels):.3f}")
