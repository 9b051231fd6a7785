"""torch.distributed with Gloo: send and recv between two processes, all-reduce among several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..rig.reducing import by_size
from ..rig.team import measured_pair, measured_team, stay_on
from ..rig.turns import Measured, in_parts, timed
from .base import Baseline

_LEARNING_RATE = 1e-4


class Gloo(Baseline):
    name = "gloo"
    modules = ("torch.distributed",)
    install = "pip install torch, in a build with Gloo"

    @property
    def is_installed(self) -> bool:
        import torch.distributed as dist

        return dist.is_available() and dist.is_gloo_available()

    def exchange(self, num_floats: int) -> AbstractContextManager[Measured]:
        return measured_pair(pair_life, num_floats)

    def latency(self, floats: int) -> AbstractContextManager[Measured]:
        return measured_pair(ping_life, floats)

    def round(self, num_floats: int, workers: int) -> AbstractContextManager[Measured]:
        return measured_team(workers, round_life, num_floats)

    def allreduce(self, sizes: Sequence[int], workers: int) -> AbstractContextManager[Measured]:
        return measured_team(workers, reduce_life, sizes)


@contextmanager
def process_group(rank: int, store: str, num_members: int, device: str = "lo") -> Iterator[Any]:
    """torch.distributed with Gloo over this network device, in this process, until the block ends."""
    stay_on(device)
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_members)
    try:
        yield dist
    finally:
        dist.destroy_process_group()


def swap(dist: Any, rank: int, up: Any, down: Any, before_reply: Callable[[], object] = lambda: None) -> None:
    """Rank 0 sends `up` and receives `down`; rank 1 the other way round."""
    if rank == 0:
        dist.send(up, 1)
        dist.recv(down, 1)
    else:
        dist.recv(up, 0)
        before_reply()
        dist.send(down, 0)


@contextmanager
def pair_life(rank: int, store: str, num_floats: int) -> Iterator[Measured]:
    """Send a flat tensor and receive one; `up` and `down` confirm with one number that all bytes have arrived."""
    import torch

    with process_group(rank, store, 2) as dist:
        flat, weights, number = torch.randn(num_floats), torch.randn(num_floats), torch.zeros(1)
        yield in_parts({
            "up": lambda: swap(dist, rank, flat, number),
            "down": lambda: swap(dist, rank, number, flat),
            "exchange": lambda: swap(dist, rank, flat, flat),
            "whole": lambda: swap(dist, rank, flat, weights, lambda: weights.sub_(flat, alpha=_LEARNING_RATE)),
        })  # fmt: skip


@contextmanager
def ping_life(rank: int, store: str, floats: int) -> Iterator[Measured]:
    import torch

    with process_group(rank, store, 2) as dist:
        flat = torch.randn(floats)
        yield timed("exchange", lambda: swap(dist, rank, flat, flat))


@contextmanager
def round_life(rank: int, store: str, workers: int, num_floats: int) -> Iterator[Measured]:
    """Run all-reduce of the flat gradient, its mean, and this worker's fused SGD step."""
    import torch

    with process_group(rank, store, workers) as dist:
        weights, gradient = torch.nn.Parameter(torch.randn(num_floats)), torch.randn(num_floats) * 1e-3
        optimizer = torch.optim.SGD([weights], lr=_LEARNING_RATE, fused=True)
        weights.grad = gradient

        def one_round() -> None:
            dist.all_reduce(gradient)
            gradient.div_(workers)
            optimizer.step()

        yield timed("round", one_round)


@contextmanager
def reduce_life(rank: int, store: str, workers: int, sizes: Sequence[int]) -> Iterator[Measured]:
    """Sum flat tensors of these sizes (bytes) in place."""
    import torch

    with process_group(rank, store, workers) as dist:
        tensors = {size: torch.zeros(size // 4) for size in sizes}  # a sum of sums stays finite
        yield by_size({size: lambda item=tensor: dist.all_reduce(item) for size, tensor in tensors.items()})  # type: ignore[misc]


ENTRY = Gloo
