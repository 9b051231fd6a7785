"""A real worker around a synthetic model, by the public API."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..common.cli import before_torch
from ..common.config import LogConfig
from ..common.log import setup_logging

# Small enough that weights stay finite however many exchanges there are.
_LEARNING_RATE = 1e-4


@dataclass
class JoinedWorker:
    """One call of `optimizer.step()` is one exchange; the gradients are in place."""

    session: Any  # paramserver.worker.api.RemoteSession
    optimizer: Any
    body_bytes: int  # of the parameters
    sent_bytes: int  # of a contribution, as the codec has it

    @property
    def moments(self) -> Any:
        """When what happened in the last exchange (worker/exchange.py)."""
        return self.session._exchange.moments


@contextmanager
def joined_worker(
    address: str, rank: int, num_floats: int, optimizer: str, codec: str = "raw"
) -> Iterator[JoinedWorker]:
    """Join the run at `address` with a synthetic model of `num_floats`; leave it at the end of the block."""
    before_torch()
    setup_logging(LogConfig(level="warning"), "ps-bench")
    os.environ["PS_WORKER__CODEC"] = codec
    import paramserver

    from ..common.optimizers import find_optimizer
    from ..common.registry import CODECS
    from ..worker.transfer import ModelTensors
    from .model import fill_gradients, synthetic_model

    model = synthetic_model(num_floats)
    with paramserver.connect(address, rank=rank) as session:
        inner = find_optimizer(optimizer)(model.parameters(), lr=_LEARNING_RATE)  # type: ignore[call-arg]
        layout = ModelTensors(model).layout
        stepped = session.optimizer(model, inner)
        fill_gradients(model)
        yield JoinedWorker(session, stepped, layout.parameter_bytes, CODECS.load(codec)().encoded_bytes(layout))


def take_steps(address: str, rank: int, num_floats: int, optimizer: str, num_steps: int) -> None:
    """A worker's whole life, for a process of its own."""
    with joined_worker(address, rank, num_floats, optimizer) as worker:
        for _ in range(num_steps):
            worker.optimizer.step()
