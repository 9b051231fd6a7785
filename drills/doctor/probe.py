"""A training script that measures: its machine, and what exchanges with the server take over the lane it was given.

    python probe.py MEGABYTES SECONDS in-turn|together

Started by `ps-launch doctor` as each worker; says one line `PROBE {...}`. In turn, each has the server to itself for so
many seconds; together, all have it at once.
"""

import json
import os
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import time

import torch

import paramserver
from paramserver.common.version import PROGRAM_VERSION

_FSYNC_BYTES = 1 << 20


def main(megabytes: float, seconds: float, order: str) -> None:
    """Measure, and say it."""
    size = max(16, int(megabytes * 1e6 / 4))
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(size))])
    with paramserver.connect() as session:
        optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.0))
        model[0].grad = torch.full((size,), 1e-3)
        optimizer.step()  # memory is touched, and all are here
        begins = time.monotonic() + (session.rank * seconds if order == "in-turn" else 0.0)
        while time.monotonic() < begins:  # in turn; so that nobody is missed the time is not slept through
            time.sleep(0.01)
        taken: list[float] = []
        while time.monotonic() < begins + seconds or len(taken) < 3:
            began = time.perf_counter()
            optimizer.step()
            taken.append(time.perf_counter() - began)
        rank = session.rank
    taken.sort()
    found = {
        "rank": rank, "bytes": 4 * size, "num": len(taken), "median_s": statistics.median(taken),
        "p99_s": taken[min(len(taken) - 1, int(0.99 * len(taken)))], **machine(),
    }  # fmt: skip
    print("PROBE", json.dumps(found), flush=True)


def machine() -> dict[str, object]:
    """Of this one. Bytes and seconds."""
    memory = {}
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            memory[name] = int(rest.split()[0]) * 1024
    return {
        "host": platform.node(), "python": platform.python_version(), "torch": torch.__version__.split("+")[0],
        "program": PROGRAM_VERSION, "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0], "free_memory": memory.get("MemAvailable", 0), "folder": os.getcwd(),
        "free_disk": shutil.disk_usage(".").free, "fsync_s": _fsync_s(), "time": time.time(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1], "cuda": torch.cuda.device_count(),
        "free_shm": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
    }  # fmt: skip


def _fsync_s() -> float:
    """Of a MiB in this folder, median of five; -1: nothing can be written here."""
    taken = []
    try:
        with tempfile.TemporaryFile(dir=".") as file:
            for _ in range(5):
                file.write(bytes(_FSYNC_BYTES))
                began = time.perf_counter()
                file.flush()
                os.fsync(file.fileno())
                taken.append(time.perf_counter() - began)
    except OSError:
        return -1.0
    return statistics.median(taken)


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
