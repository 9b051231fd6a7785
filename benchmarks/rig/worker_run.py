"""A real worker around a synthetic model, by the public API."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...common.config.cli import before_torch
from ...common.config.schema import LogConfig
from ...common.reporting.log import setup_logging
from .moments import Watch

# Small enough that weights stay finite however many exchanges there are.
_LEARNING_RATE = 1e-4


@dataclass
class JoinedWorker:
    """One call of `optimizer.step()` is one exchange; the gradients are in place."""

    session: Any  # paramserver.worker.training.session.Session
    optimizer: Any
    parameters: list[Any]
    gradients: list[Any]  # as they were made, each in memory of its own
    payload_bytes: int  # of the parameters
    sent_bytes: int  # of a contribution, as the codec has it
    watch: Watch
    device: str = "cpu"

    def wait(self) -> None:
        """Wait until the weights of the last exchange are on the device."""
        if self.device != "cpu":
            import torch

            torch.cuda.synchronize(self.device)

    @property
    def transport(self) -> str:
        """The transport in use, by its name in `worker.transports`."""
        return str(self.session._exchange.shards.transport).removesuffix(" memory")

    def renew_gradients(self) -> None:
        """As a backward leaves them that made new ones: in memory of their own, not where they were sent from."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient


@contextmanager
def joined_worker(
    address: str,
    rank: int,
    num_floats: int,
    optimizer: str,
    codec: str = "raw",
    transport: str = "shared",
    ca: str | None = None,
    device: str = "cpu",
) -> Iterator[JoinedWorker]:
    """Join the run at `address` with a synthetic model of `num_floats` on `device`, over `transport` or what comes
    after it, in TLS if there is a `ca`; leave it at the end of the block."""
    before_torch()
    setup_logging(LogConfig(level="warning"), "ps-bench")
    set_transport(transport)
    os.environ |= {"PS_WORKER__CODEC": codec, "PS_SECURITY__CA": ca or ""}
    import paramserver

    from ...common.registry import CODECS
    from ...common.tensors.optimizers import find_optimizer
    from ...worker.tensors.transfer import ModelTensors
    from .model import fill_gradients, synthetic_model

    model = synthetic_model(num_floats).to(device)
    with paramserver.connect(address, rank=rank) as session:
        inner = find_optimizer(optimizer)(model.parameters(), lr=_LEARNING_RATE)  # type: ignore[call-arg]
        layout = ModelTensors(model).layout
        stepped = session.optimizer(model, inner)
        fill_gradients(model)
        parameters = list(model.parameters())
        gradients = [parameter.grad for parameter in parameters]
        sent_bytes = CODECS.load(codec)().encoded_bytes(layout)
        watch = Watch(session)
        yield JoinedWorker(session, stepped, parameters, gradients, layout.parameter_bytes, sent_bytes, watch, device)


def set_transport(transport: str) -> None:
    """The best that workers take which this process or its children start: grpc, direct or shared."""
    transports = ("shared", "direct", "grpc")
    os.environ["PS_WORKER__TRANSPORTS"] = ",".join(transports[transports.index(transport) :])
