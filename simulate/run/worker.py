"""One simulated worker."""

from __future__ import annotations

from dataclasses import dataclass

from ...ps.core import events
from ..machines.world import Compute


@dataclass(eq=False, slots=True)
class Worker:
    """The state of one rank. Times are virtual seconds."""

    rank: int
    compute: Compute
    incarnation: int = 0
    life: int = 0  # pushes and transfers of an older life are dropped
    counted: int = 0
    version: int = 0  # of its weights
    base: int = 0  # version of the current computation
    next_steps: int = 0  # local steps of the next contribution
    steps: int = 0  # of the current one
    done_steps: int = 0  # as if every sent contribution counts
    computed_s: float = 0.0
    is_computing: bool = False
    is_ready: bool = False  # computed, but the previous exchange is not over
    is_in_flight: bool = False
    is_staged: bool = False
    is_finished: bool = False
    event: events.Contributed | None = None  # sent last
    sent_at: float = 0.0
    begun_at: float = 0.0  # the upload
    decided_at: float = 0.0
    left_at: float = 0.0  # when the reply left the server
    transfer_s: float = 0.0  # of the last exchange
    num_sent: float = 0  # bytes
    num_received: float = 0
