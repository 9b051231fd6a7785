"""A worker of a race: a byte transformer trained from the same weights on the same batches, whatever exchanges them.

    python -m paramserver.benchmarks.rig.racer FOLDER RANK

The folder has what is to be done (`Race`). Once model and exchange stand, the worker waits for the start that all
share. The clock then runs for the same seconds on every side. A thread beside the training copies rank 0's weights,
more often at the beginning, where losses fall fast. It also notes the steps and the bytes of the link. The last sample
is the end of the run, whatever a worker is doing then. The copies are evaluated when all workers have been ended:
evaluation costs no side time or bytes.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from .links import link_bytes

NUM_SAMPLES = 12  # at n^2 / 144 of the time
WEIGHTS = "weights.safetensors"  # rank 0's at each sample
LOCAL_STEPS = 8  # between two averages of weights: what our localsgd takes by default
OUTER_STEPS, OUTER_LR, OUTER_MOMENTUM = 25, 0.7, 0.5  # of every DiLoCo: what ours take by default
CONTEXT, BATCH = 64, 8
_WARMUP = 4
_LEFT_S = 60.0  # after the end; by then this process has been killed


@dataclass(frozen=True)
class Race:
    """What a run's workers do. `peer` is a file of baselines; with None the exchange is ours, by PS_... in the
    environment. `slow` is by what the last rank's computing takes longer."""

    peer: str | None
    addresses: list[str]
    lr: float
    seed: int
    seconds: float
    slow: float
    regions: int = 0  # the workers share so many hosts; 0: each has its own
    has_relays: bool = False  # a worker's rank is that in its region

    def host_of(self, rank: int) -> int:
        return rank if not self.regions else rank * self.regions // len(self.addresses)

    def write(self, folder: Path) -> None:
        (folder / "race.json").write_text(json.dumps(asdict(self)))


@dataclass
class Racer:
    """One worker, as a side's exchange sees it."""

    race: Race
    rank: int
    folder: Path
    model: Any
    steps: int = 0
    is_over: bool = False

    @property
    def workers(self) -> int:
        return len(self.race.addresses)

    @property
    def address(self) -> str:
        """Of this worker's host."""
        return self.race.addresses[self.rank]

    def optimizer(self) -> Any:
        """The local optimizer, which is the same for every side."""
        import torch

        return torch.optim.AdamW(self.model.parameters(), lr=self.race.lr)

    def post(self, name: str, text: str) -> None:
        """Tell all workers something, once."""
        path = self.folder / f".{name}"
        path.write_text(text)
        path.rename(self.folder / name)

    def read(self, name: str) -> str:
        """What was posted under this name; waits for it, for as long as the race is on."""
        path, parent = self.folder / name, os.getppid()
        while not path.exists():
            if os.getppid() != parent:
                os._exit(1)
            time.sleep(0.005)
        return path.read_text()


def race_task() -> Any:
    """The task: 1.9 million parameters, the text of Python's own library."""
    from ...worker.tasks.gpt import Gpt

    return Gpt(context=CONTEXT, num_layers=4, num_heads=4, width=192, eval_bytes=4_096)


@contextmanager
def _ours(racer: Racer) -> Iterator[tuple[Any, Any]]:
    import paramserver

    race = racer.race
    rank = racer.rank % (racer.workers // race.regions) if race.has_relays else racer.rank
    with paramserver.connect(rank=rank) as session:
        yield racer.model, session.optimizer(racer.model, racer.optimizer())


def _side(racer: Racer) -> AbstractContextManager[tuple[Any, Any]]:
    """The module to call and the optimizer to step, in which a side's exchange is."""
    from ..baselines import BASELINES

    found: AbstractContextManager[tuple[Any, Any]]
    found = BASELINES.load(racer.race.peer)().race(racer) if racer.race.peer else _ours(racer)
    return found


def _batches(task: Any, racer: Racer) -> Iterator[Any]:
    import torch

    (windows,) = task.train_data().tensors
    chance = torch.Generator().manual_seed(racer.race.seed * 1_000 + racer.rank)
    while True:
        yield (windows[torch.randint(len(windows), (BATCH,), generator=chance)],)


def _pause_s(task: Any, racer: Racer) -> float:
    """What a slow worker waits in each step, by what computing takes here; the others take part in the measurement."""
    import torch

    seconds = []
    for _, batch in zip(range(_WARMUP), _batches(task, racer), strict=False):
        began = time.perf_counter()
        task.loss(racer.model, batch).backward()
        seconds.append(time.perf_counter() - began)
    racer.model.zero_grad()
    assert torch.get_num_threads() == 1
    return median(seconds) * (racer.race.slow - 1) if racer.rank == racer.workers - 1 else 0.0


def _watch(racer: Racer, start: float) -> None:
    """Take the samples and write them. What the training does afterwards, failing for lack of others say, is lost."""
    import torch
    from safetensors.torch import save_file

    bytes_before, seen, copies = link_bytes(), [], []
    for number in range(1, NUM_SAMPLES + 1):
        time.sleep(max(0.0, start + racer.race.seconds * (number / NUM_SAMPLES) ** 2 - time.monotonic()))
        if racer.rank == 0:
            copies.append(torch.cat([item.detach().flatten() for item in racer.model.parameters()]))
        seen.append((time.monotonic() - start, racer.steps, link_bytes() - bytes_before))
    racer.is_over = True
    if racer.rank == 0:
        save_file({str(number): copy for number, copy in enumerate(copies)}, racer.folder / WEIGHTS)
    racer.post(f"done{racer.rank}", json.dumps(seen))
    time.sleep(_LEFT_S)
    os._exit(0)


def _train(task: Any, racer: Racer, module: Any, optimizer: Any, pause_s: float) -> None:
    for batch in _batches(task, racer):
        time.sleep(pause_s)
        loss = task.loss(module, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        racer.steps += 1


def main() -> None:
    import torch

    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    race = Race(**json.loads((folder / "race.json").read_text()))
    torch.set_num_threads(1)
    task = race_task()
    torch.manual_seed(race.seed)
    racer = Racer(race, rank, folder, task.model())
    pause_s = _pause_s(task, racer)
    with _side(racer) as (module, optimizer):
        racer.post(f"ready{rank}", "")
        start = float(racer.read("start"))
        time.sleep(max(0.0, start - time.monotonic()))
        threading.Thread(target=_watch, args=(racer, start), daemon=True).start()
        try:
            _train(task, racer, module, optimizer, pause_s)
        except Exception:
            if racer.is_over:
                time.sleep(_LEFT_S)
            raise


if __name__ == "__main__":
    main()
