"""hivemind's optimizer with its own defaults: gradients gathered until all workers together have a batch, then averaged
in full precision, and a step by each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..rig.racer import BATCH, Racer
from .base import Baseline


class Hivemind(Baseline):
    name = "hivemind"
    modules = ("hivemind",)
    install = "pip install -c constraints.txt 'paramserver[race]'"

    @contextmanager
    def race(self, racer: Racer) -> Iterator[tuple[Any, Any]]:
        import hivemind

        here = {"start": True, "host_maddrs": [f"/ip4/{racer.address}/tcp/0"]}
        if racer.rank == 0:
            table = hivemind.DHT(**here)
            racer.post("peers", "\n".join(str(address) for address in table.get_visible_maddrs()))
        else:
            table = hivemind.DHT(**here, initial_peers=racer.read("peers").split())
        optimizer = hivemind.Optimizer(
            dht=table, run_id="race", optimizer=racer.optimizer(), batch_size_per_step=BATCH,
            target_batch_size=BATCH * racer.workers, matchmaking_time=1.0,
        )  # fmt: skip
        yield racer.model, optimizer


ENTRY = Hivemind
