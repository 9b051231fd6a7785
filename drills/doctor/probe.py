"""A training script that measures its machine, a step of the task, and exchanges with the server over each transport.

    python probe.py PLAN         as JSON: see `Plan` in measure.py

`ps-launch doctor` starts it as each worker. It repeats the same measurements in rounds, and prints one line
`PROBE {...}` for each. The doctor ends it when rounds agree.

In a round the workers take turns: one worker exchanges with the server over one transport after another. Then all
workers exchange at once, each over its best transport. Workers read the turn from the server's status: instead of a
loss, each contribution carries the number of the last phase that its worker has finished.
"""

import json
import math
import os
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import time
import timeit
from functools import partial
from itertools import chain, repeat
from typing import Any

from paramserver.common.config.cli import before_torch

before_torch()  # as in ps-worker: on a busy machine a step of digits took 0.94 s with spinning threads, 6 ms without

import torch  # noqa: E402

import paramserver  # noqa: E402
from paramserver.common.config.sources import load_config  # noqa: E402
from paramserver.common.version import PROGRAM_VERSION  # noqa: E402
from paramserver.common.wire.json_text import read_json  # noqa: E402

_FSYNC_BYTES = 1 << 20
_LOOK_S = 0.02
_NUM_TRIPS = 20  # in a turn
_LEAST, _ENOUGH = 2, 25  # exchanges of each kind in a turn: at least so many, and a turn of so many ends early
_TASK_S, _TASK_STEPS = 1.0, 60  # steps of the task: at most so long and so many, at least three
_NAMES = {"shared memory": "shared"}


def main(plan: dict[str, Any]) -> None:
    """Measure and print, until `rounds` are over or this process is ended."""
    config = load_config(None, {}, [], os.environ).config
    compute_s, num_bytes = (None, 0) if plan["task"] is None else of_task(plan["task"], config)
    if plan["megabytes"] is not None:
        num_bytes = int(plan["megabytes"] * 1e6)
    size = max(16, num_bytes // 4)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(size))])
    with paramserver.connect() as session:
        optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.0))
        model[0].grad = torch.full((size,), 1e-3)
        session.record(loss=0.0)
        optimizer.step()  # touches memory, and waits for all workers
        say(session, "machine", bytes=4 * size, compute_s=compute_s, **machine())
        turns = Turns(session, optimizer, plan["seconds"])
        for number in range(plan["rounds"]):
            one_round(turns, number, plan["transports"])


class Turns:
    """Takes turns with the other workers, and measures exchanges in its own turn."""

    def __init__(self, session: Any, optimizer: Any, seconds: float) -> None:
        self.session, self._optimizer, self._seconds = session, optimizer, seconds
        self.exchange = session._exchange
        self._status = self.exchange.shards.first.channel.status
        self.phase = 0  # the current phase

    def wait(self, in_turn: bool) -> None:
        """Wait until all workers have finished the earlier phases; `in_turn`: lower ranks also this phase."""
        rank = self.session.rank
        while True:
            workers = read_json(self._status().status)["workers"]
            done = {worker["rank"]: math.nan if worker["loss"] is None else worker["loss"] for worker in workers}
            if all(done.get(item, 0) >= self.phase + (in_turn and item < rank) for item in done if item != rank):
                return
            time.sleep(_LOOK_S)

    def measured(self) -> tuple[float, float, float]:
        """Returns the median seconds of an upload alone, of an exchange in both directions, and of their sum."""
        taken: dict[bool, list[float]] = {True: [], False: []}
        self._step(self.phase)  # warm up new streams
        until = time.monotonic() + self._seconds
        while (num := min(map(len, taken.values()))) < _LEAST or (time.monotonic() < until and num < _ENOUGH):
            fetches, took_s = self._step(self.phase)
            taken[fetches].append(took_s)
        self.phase += 1
        self._step(self.phase)
        pairs = map(sum, zip(taken[False], taken[True], strict=False))
        return statistics.median(taken[False]), statistics.median(taken[True]), statistics.median(pairs)

    def _step(self, done: int) -> tuple[bool, float]:
        """Take a step. Returns whether it fetched weights, and its seconds."""
        progress = self.session._progress
        fetches = progress.next_number % progress.pull_every == 0
        self.session.record(loss=float(done))
        began = time.perf_counter()
        self._optimizer.step()
        return fetches, time.perf_counter() - began

    def trips(self) -> list[float]:
        """Returns the seconds of small round trips, sorted."""
        return sorted(timeit.repeat(self._status, repeat=_NUM_TRIPS, number=1))


def one_round(turns: Turns, number: int, transports: list[str]) -> None:
    """Measure each transport in turn, then all workers at once over their best ones."""
    session, best = turns.session, (float("inf"), "grpc")
    for transport in transports:
        turns.wait(in_turn=True)
        turns.exchange.use_transports(tuple(dict.fromkeys((transport, "grpc"))))
        given = _NAMES.get(turns.exchange.shards.transport, turns.exchange.shards.transport)
        trips = turns.trips()
        up_s, both_s, _ = turns.measured()
        if given == transport:
            best = min(best, (both_s, transport))
        reason = turns.exchange.shards.first.transports.reason
        say(session, "transport", round=number, transport=transport, given=given, reason=reason, up_s=up_s,
            both_s=both_s, trip_s=statistics.median(trips), trip_p99_s=trips[int(0.99 * len(trips))])  # fmt: skip
    turns.wait(in_turn=False)
    turns.exchange.use_transports(tuple(dict.fromkeys((best[1], "grpc"))))
    # A worker may use more of a shared link while it fetches weights, and less in between.
    say(session, "together", round=number, transport=best[1], pair_s=turns.measured()[2])


def say(session: Any, kind: str, **metrics: Any) -> None:
    print("PROBE", json.dumps({"rank": session.rank, "kind": kind, **metrics}), flush=True)


def of_task(task: dict[str, Any], config: Any) -> tuple[float, int]:
    """Returns the seconds that a training step of the task computes, and the bytes of its contribution."""
    from paramserver.worker.tensors.transfer import ModelTensors
    from paramserver.worker.trainer import choose_device
    from paramserver.worker.training.data import to_device
    from paramserver.worker.training.slowdown import Slowdown
    from paramserver.worker.training.tasks.loading import load_task

    if config.worker.threads is not None:
        torch.set_num_threads(config.worker.threads)
    device = choose_device(config.worker.device)
    made = load_task(task["name"], task["args"], seed=config.run.seed, device=device)
    model = made.model().to(device)
    batches = torch.utils.data.DataLoader(made.train_data(), task["batch_size"], shuffle=True)
    delays = Slowdown(config.slowdown, config.worker.rank or 0, config.run.seed)
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(task["precision"])
    taken: list[float] = []
    until, began = time.monotonic() + _TASK_S, time.perf_counter()
    for batch in chain.from_iterable(repeat(batches)):
        model.zero_grad()
        with torch.autocast(device.type, precision, enabled=precision is not None):
            loss = made.loss(model, to_device(batch, device))
        loss.backward()
        loss.item()
        took_s = time.perf_counter() - began
        taken.append(took_s + delays.delay_s(len(taken) + 1, took_s))
        if len(taken) >= _TASK_STEPS or (time.monotonic() >= until and len(taken) >= 4):
            break
        began = time.perf_counter()
    # The first step loads and allocates.
    return task["accumulate"] * statistics.median(taken[1:]), ModelTensors(model).layout.exchange_bytes


def machine() -> dict[str, object]:
    """Returns the facts of this machine, in bytes and seconds."""
    with open("/proc/meminfo", encoding="ascii") as file:
        memory = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":") for line in file)}
    return {
        "host": platform.node(), "python": platform.python_version(), "torch": torch.__version__.split("+")[0],
        "program": PROGRAM_VERSION, "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0], "free_memory": memory.get("MemAvailable", 0), "folder": os.getcwd(),
        "free_disk": shutil.disk_usage(".").free, "fsync_s": _fsync_s(), "time": time.time(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1], "cuda": torch.cuda.device_count(),
        "free_shm": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
    }  # fmt: skip


def _fsync_s() -> float:
    """Returns the median seconds to sync a MiB in this folder; -1: the folder is not writable."""
    try:
        with tempfile.TemporaryFile(dir=".", buffering=0) as file:
            sync, write = partial(os.fsync, file.fileno()), partial(file.write, bytes(_FSYNC_BYTES))
            return statistics.median(timeit.repeat(sync, write, repeat=5, number=1))
    except OSError:
        return -1.0


if __name__ == "__main__":
    main(read_json(sys.argv[1]))
