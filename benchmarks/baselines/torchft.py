"""torchft's DiLoCo: a manager for each worker, a lighthouse beside rank 0, and the outer step that ours takes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from ..rig.links import DEVICE
from ..rig.racer import OUTER_LR, OUTER_MOMENTUM, OUTER_STEPS, Racer
from ..rig.team import stay_on
from .base import Baseline

_PORT, _WAIT = 5291, timedelta(seconds=60)


class TorchFt(Baseline):
    name = "torchft"
    modules = ("torchft",)
    install = "pip install -c constraints.txt 'paramserver[race]'"

    @contextmanager
    def race(self, racer: Racer) -> Iterator[tuple[Any, Any]]:
        stay_on(DEVICE)
        import torch
        from torch.distributed import TCPStore
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo

        logging.disable(logging.INFO)
        if racer.rank == 0:
            # Kept as long as this process runs.
            self._lighthouse = LighthouseServer(bind=f"[::]:{_PORT}", min_replicas=racer.workers, join_timeout_ms=100)
        store = TCPStore(racer.address, 0, is_master=True, wait_for_workers=False)
        model, optimizer = racer.model, racer.optimizer()
        manager = Manager(
            pg=ProcessGroupGloo(timeout=_WAIT),
            load_state_dict=None, state_dict=None, use_async_quorum=False, init_sync=False,
            min_replica_size=racer.workers, timeout=_WAIT, rank=0, world_size=1,
            store_addr=racer.address, store_port=store.port, hostname=racer.address,
            replica_id=f"worker{racer.rank}", lighthouse_addr=f"http://{racer.race.addresses[0]}:{_PORT}",
        )  # fmt: skip
        outer = torch.optim.SGD(model.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
        with DiLoCo(manager, [model], optimizer, outer, OUTER_STEPS, pin_memory=False, use_bucketization=True):
            yield model, optimizer


ENTRY = TorchFt
