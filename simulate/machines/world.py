"""The machines and links of a simulated run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...common.config.schema import SlowdownConfig
from ..traffic.framing import Framing


@dataclass(frozen=True)
class World:
    """Bytes per second, seconds, bytes. A bandwidth of infinity costs no time."""

    num_workers: int = 2
    seed: int = 0
    compute_s: float = 0.1  # of a training step, mean
    jitter: float = 0.0  # its standard deviation, as a part of the mean (log-normal)
    speeds: tuple[float, ...] = (1.0,)  # rank r takes compute_s / speeds[r mod their number]
    slowdown: SlowdownConfig = field(default_factory=SlowdownConfig)
    down: float = math.inf  # of each worker's link
    up: float = math.inf
    latency_s: float = 0.0  # there and back
    server_down: float = math.inf  # of the server's own link, for its uploads
    server_up: float = math.inf
    fold_s: float = 0.0  # to add one contribution to a mean
    step_s: float = 0.0  # from a mean to a version
    up_bytes: int = 0  # of a contribution
    down_bytes: int = 0  # of a reply with weights
    start_bytes: int = 0  # of the weights that a worker starts from
    framing: Framing | None = None  # None: only payloads are counted
    max_staged: int = 4  # uploads in the server's memory
    mtbf_s: float = math.inf  # mean time of a worker between two failures
    back_s: float = 30.0  # from a failure until its next process joins
    label: str = ""  # of the run, in results; empty: its mode
    trains_on: bool = False  # workers are relays of regions that train on during an exchange
    behind: int = 1  # workers behind each worker, which is the relay of a region
    ideal: float = 0.0  # training steps a second if all workers only computed; 0: as its own workers compute
    joins_at: tuple[float, ...] = ()  # when the last ranks join, ascending; all others at 0
    # Instead of these: seconds of computing and exchange of each rank's contributions (`fit.py`).
    recorded: tuple[tuple[tuple[float, float], ...], ...] = ()
