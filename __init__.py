"""paramserver: a parameter server for PyTorch over gRPC.

Four ways to synchronise behind one training loop:

    session = paramserver.connect("10.0.0.1:50051", rank=0)
    optimizer = session.optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

Nothing heavy is imported until it is used.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# DataLoader forks while gRPC's threads run. gRPC's fork handlers then do nothing, and sometimes abort the new process.
# Loader processes do not need gRPC, which reads this when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

if TYPE_CHECKING:
    from .common.errors import ParamServerError
    from .common.tensors.onebit import OneBitAdam
    from .serve.process import serve_model
    from .worker.api import connect
    from .worker.training.session import Session

__all__ = ["OneBitAdam", "ParamServerError", "Session", "connect", "serve_model"]

_HOME = {
    "OneBitAdam": "common.tensors.onebit",
    "ParamServerError": "common.errors",
    "Session": "worker.training.session",
    "connect": "worker.api",
    "serve_model": "serve.process",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'paramserver' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
