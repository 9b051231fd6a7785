"""torch.distributed.rpc over TensorPipe: remote calls that carry a tensor there, and one back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..rig.team import measured_pair, stay_on
from ..rig.turns import Measured, in_parts, timed
from .base import Baseline

_WORKER, _SERVER = "worker", "server"

# Of the serving process: what was pushed last, and the weights. Tensors, once `rpc_life` has begun.
_tensors: dict[str, Any] = {}


class TorchRpc(Baseline):
    name = "torch-rpc"
    modules = ("torch.distributed.rpc",)
    install = "pip install torch, in a build with torch.distributed.rpc"

    @property
    def is_installed(self) -> bool:
        try:
            from torch.distributed import rpc
        except ImportError:
            return False
        return rpc.is_available()

    def exchange(self, num_floats: int) -> AbstractContextManager[Measured]:
        return measured_pair(rpc_life, num_floats, False)

    def latency(self, floats: int) -> AbstractContextManager[Measured]:
        return measured_pair(rpc_life, floats, True)


@contextmanager
def rpc_life(rank: int, store: str, num_floats: int, one_call: bool) -> Iterator[Measured]:
    """Rank 0 calls, rank 1 serves. `one_call`: gradients there and weights back at once."""
    stay_on("lo")
    warnings.simplefilter("ignore")  # torch warns of itself
    import torch
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=store, rpc_timeout=300)
    _tensors["weights"] = torch.randn(num_floats)
    name = _WORKER if rank == 0 else _SERVER
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    gradient, weights = torch.randn(num_floats), torch.zeros(num_floats)

    def push() -> Any:
        return rpc.rpc_sync(_SERVER, serve_push, (gradient,))

    def pull() -> Any:
        return rpc.rpc_sync(_SERVER, serve_pull)

    def exchange() -> Any:
        return (push(), pull())

    def whole() -> Any:
        rpc.rpc_sync(_SERVER, serve_step, (gradient,))
        return weights.copy_(pull())

    def both() -> Any:
        return rpc.rpc_sync(_SERVER, serve_both, (gradient,))

    try:
        if rank == 1:
            yield timed("served", lambda: None)
        elif one_call:
            yield timed("exchange", both)
        else:
            yield in_parts({"up": push, "down": pull, "exchange": exchange, "whole": whole})
    finally:
        rpc.shutdown(graceful=True)


def serve_push(gradient: Any) -> None:
    """Keep the gradient, in the serving process."""
    _tensors["gradient"] = gradient


def serve_pull() -> Any:
    return _tensors["weights"]


def serve_step(gradient: Any) -> None:
    """Take an optimizer step, because the compared exchange has one."""
    _tensors["weights"].sub_(gradient, alpha=1e-4)


def serve_both(gradient: Any) -> Any:
    serve_step(gradient)
    return serve_pull()


ENTRY = TorchRpc
