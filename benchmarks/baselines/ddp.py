"""DistributedDataParallel: a backward pass with ready-made gradients, so that only DDP is timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..rig.links import DEVICE
from ..rig.racer import Racer
from ..rig.reducing import StepSize, by_size, share_cores, step_parts, transformer
from ..rig.team import measured_team
from ..rig.turns import Measured, timed
from .base import Baseline
from .gloo import Gloo, process_group

_LEARNING_RATE = 1e-4


class DataParallel(Baseline):
    name = "ddp"
    modules = ("torch.distributed",)
    install = Gloo.install

    @property
    def is_installed(self) -> bool:
        return Gloo().is_installed

    def round(self, num_floats: int, workers: int) -> AbstractContextManager[Measured]:
        return measured_team(workers, ddp_life, num_floats)

    def allreduce(self, sizes: Sequence[int], workers: int) -> AbstractContextManager[Measured]:
        return measured_team(workers, reduce_life, sizes)

    @contextmanager
    def race(self, racer: Racer) -> Iterator[tuple[Any, Any]]:
        from torch.nn.parallel import DistributedDataParallel

        with process_group(racer.rank, (racer.folder / "store").as_uri(), racer.workers, DEVICE):
            module = DistributedDataParallel(racer.model, gradient_as_bucket_view=True)
            self.hooked(module)
            yield module, self.stepping(racer.optimizer())

    def hooked(self, module: Any) -> None:
        """Register what a variant of it does with gradients."""

    def stepping(self, optimizer: Any) -> Any:
        return optimizer

    def profile(self, size: StepSize, workers: int) -> AbstractContextManager[Measured]:
        return measured_team(workers, profile_life, size)


@contextmanager
def ddp_life(rank: int, store: str, workers: int, num_floats: int) -> Iterator[Measured]:
    """Run forward, backward with all-reduce in buckets, and this worker's fused SGD step."""
    import torch

    with process_group(rank, store, workers):
        model = _wrapped(num_floats)
        optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, fused=True)

        def step() -> None:
            optimizer.zero_grad()
            model().backward()
            optimizer.step()

        yield timed("round", step)


@contextmanager
def reduce_life(rank: int, store: str, workers: int, sizes: Sequence[int]) -> Iterator[Measured]:
    """The reducer alone: forward, and backward with all-reduce in buckets, of models of these sizes (bytes)."""
    share_cores(workers)
    with process_group(rank, store, workers):
        models = {size: _wrapped(size // 4) for size in sizes}
        yield by_size({size: lambda item=model: item().backward() for size, model in models.items()})  # type: ignore[misc]


@contextmanager
def profile_life(rank: int, store: str, workers: int, size: StepSize) -> Iterator[Measured]:
    """A step of the transformer, with DDP's own defaults but for the memory that gradients and buckets share."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    with process_group(rank, store, workers):
        bare, batch = transformer(size, rank)
        model = DistributedDataParallel(bare, gradient_as_bucket_view=True)
        yield step_parts(model, batch, torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, fused=True))


def _wrapped(num_floats: int) -> Any:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from ..rig.model import synthetic_model

    parameters = synthetic_model(num_floats)
    gradients = [torch.randn_like(parameter) * 1e-3 for parameter in parameters]
    return DistributedDataParallel(_ready_made(parameters, gradients), gradient_as_bucket_view=True)


def _ready_made(parameters: Any, gradients: list[Any]) -> Any:
    """A module whose forward costs nothing and whose backward hands out `gradients`."""
    import torch
    from torch import nn

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
            return torch.zeros(())

        @staticmethod
        def backward(ctx: Any, *_: torch.Tensor) -> Any:
            return tuple(gradients)

    class ReadyMade(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parameters_ = parameters

        def forward(self) -> torch.Tensor:
            out: torch.Tensor = Given.apply(*self.parameters_)
            return out

    return ReadyMade()


ENTRY = DataParallel
