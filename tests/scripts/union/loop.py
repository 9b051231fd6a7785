"""A script whose loss, clipping and layers are such that the union batch matters. Without PS_SERVER it is alone.

LOSS mean or sum; REDUCTION as session.optimizer takes it; CLIP a norm, or early; NORM a layer: batch, sync, group,
layer, frozen; NUM samples. The model's weights are saved to OUT.
"""

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paramserver

NUM, BATCH = 29, 4
LAYERS = {
    "": nn.Identity, "batch": lambda: nn.BatchNorm1d(8), "frozen": lambda: nn.BatchNorm1d(8).eval(),
    "sync": lambda: nn.SyncBatchNorm(8), "group": lambda: nn.GroupNorm(2, 8), "layer": lambda: nn.LayerNorm(8),
}  # fmt: skip


def make(norm: str = "") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), LAYERS[norm](), nn.Tanh(), nn.Linear(8, 1)).double()


def data(num: int = NUM) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(num, 6, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, inputs.prod(1, keepdim=True))


def own_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if os.environ.get("OPTIMIZER") == "adam":
        return torch.optim.Adam(model.parameters(), lr=lr)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def main() -> None:
    env = os.environ
    model, loss, clip = make(env.get("NORM", "")), env.get("LOSS", "mean"), env.get("CLIP", "")
    wrapped = model
    if env.get("WRAP") == "ddp":
        torch.distributed.init_process_group("gloo")
        wrapped = nn.parallel.DistributedDataParallel(model)
    with paramserver.connect() as session:
        local_optimizer = own_optimizer(model, float(env.get("LR", "0.02")))
        optimizer = session.optimizer(wrapped, local_optimizer, reduction=env.get("REDUCTION", "mean"))
        if clip == "early":
            optimizer.clip_grad_norm(1.0)
        for inputs, wanted in session.shard(data(int(env.get("NUM", NUM))), batch_size=BATCH, epochs=None):
            optimizer.zero_grad()
            F.mse_loss(wrapped(inputs), wanted, reduction=loss).backward()
            if clip:
                optimizer.clip_grad_norm(float(clip))
            optimizer.step()
        session.finish()
        torch.save(model.state_dict(), f"{env['OUT']}-{session.rank}-{session.group_rank}.pt")


if __name__ == "__main__":
    main()
