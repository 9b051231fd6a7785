"""torch.distributed with Gloo: send and recv between two processes, all-reduce among several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..rig.reducing import by_size
from ..rig.team import meeting_point, slowest, stay_on, team
from ..rig.turns import Measured, in_parts, timed
from .base import Peer

_LEARNING_RATE = 1e-4


class Gloo(Peer):
    name = "gloo"
    modules = ("torch.distributed",)
    install = "pip install torch, in a build with Gloo"

    @property
    def is_installed(self) -> bool:
        import torch.distributed as dist

        return dist.is_available() and dist.is_gloo_available()

    @contextmanager
    def exchange(self, num_floats: int) -> Iterator[Measured]:
        with meeting_point() as store, team(2, pair_life, store, num_floats) as members:
            yield lambda count: members.turns(count)[0]

    @contextmanager
    def latency(self, floats: int) -> Iterator[Measured]:
        with meeting_point() as store, team(2, ping_life, store, floats) as members:
            yield lambda count: members.turns(count)[0]

    @contextmanager
    def round(self, num_floats: int, workers: int) -> Iterator[Measured]:
        with meeting_point() as store, team(workers, round_life, store, workers, num_floats) as members:
            yield lambda count: slowest(members.turns(count))

    @contextmanager
    def allreduce(self, sizes: Sequence[int], workers: int) -> Iterator[Measured]:
        with meeting_point() as store, team(workers, reduce_life, store, workers, sizes) as members:
            yield lambda count: slowest(members.turns(count))


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


@contextmanager
def pair_life(rank: int, store: str, num_floats: int) -> Iterator[Measured]:
    """Rank 0 sends a flat tensor and receives one; rank 1 the other way round."""
    import torch

    with process_group(rank, store, 2) as dist:
        flat, received = torch.randn(num_floats), torch.zeros(1)

        def up() -> None:
            """Send, and receive one number back: a send alone may end before all bytes have arrived."""
            if rank == 0:
                dist.send(flat, 1)
                dist.recv(received, 1)
            else:
                dist.recv(flat, 0)
                dist.send(received, 0)

        def down() -> None:
            if rank == 0:
                dist.send(received, 1)
                dist.recv(flat, 1)
            else:
                dist.recv(received, 0)
                dist.send(flat, 0)

        def exchange() -> None:
            if rank == 0:
                dist.send(flat, 1)
                dist.recv(flat, 1)
            else:
                dist.recv(flat, 0)
                dist.send(flat, 0)

        weights = torch.randn(num_floats)

        def whole() -> None:
            if rank == 0:
                dist.send(flat, 1)
                dist.recv(weights, 1)
            else:
                dist.recv(flat, 0)
                dist.send(weights.sub_(flat, alpha=_LEARNING_RATE), 0)

        yield in_parts({"up": up, "down": down, "exchange": exchange, "whole": whole})


@contextmanager
def ping_life(rank: int, store: str, floats: int) -> Iterator[Measured]:
    import torch

    with process_group(rank, store, 2) as dist:
        flat = torch.randn(floats)

        def exchange() -> None:
            if rank == 0:
                dist.send(flat, 1)
                dist.recv(flat, 1)
            else:
                dist.recv(flat, 0)
                dist.send(flat, 0)

        yield timed("exchange", exchange)


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
