"""One simulated worker: what it has, and what it is about."""

from __future__ import annotations

from dataclasses import dataclass

from ...ps.core import events
from ..machines.compute import Compute


@dataclass(eq=False, slots=True)
class Worker:
    """One rank. Versions are of weights that it holds, times virtual seconds."""

    rank: int
    compute: Compute
    incarnation: int = 0
    life: int = 0  # what was begun in an older one is of nobody
    counted: int = 0
    version: int = 0  # received last
    base: int = 0  # that it computes on
    told_steps: int = 0  # local steps of its contributions
    steps: int = 0  # in the one that is computed or on its way
    done_steps: int = 0  # as if all that it sent counted
    computed_s: float = 0.0
    is_computing: bool = False
    is_ready: bool = False  # computed, and the exchange before is not over
    is_in_flight: bool = False
    is_staged: bool = False
    is_finished: bool = False
    event: events.Contributed | None = None  # that it has sent
    sent_steps: int = 0  # in it
    sent_at: float = 0.0
    begun_at: float = 0.0  # the upload: it has a place
    decided_at: float = 0.0
    left_at: float = 0.0  # the reply, from the server
    transfer_s: float = 0.0  # of the last exchange
    num_sent: float = 0  # bytes
    num_received: float = 0
