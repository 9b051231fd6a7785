"""Where a run stands at one moment: one type from the server, or a run without one, to the screen.

As the log event `status`, the answer to the call Status (proto/parameter_server.proto), and what the launcher shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field, ValidationError, computed_field

from .curve import Point
from .summary import total_or_unknown

_OFTEN_EMPTY = ("versions", "held_bytes", "evaluated", "left_out", "total")


class WorkerStatus(BaseModel):
    """One rank at one moment. Shares are parts (0..1) of its time."""

    rank: int
    state: str = ""  # joining, computing, uploading, waiting, away, finished, gone
    step: int = 0
    lead: int = 0  # contributions ahead of the slowest live worker
    loss: float | None = None  # mean training loss it said last
    samples_per_s: float | None = 0.0  # None: nobody says how many samples a step has
    compute_share: float = 0.0
    transfer_share: float = 0.0
    wait_share: float = 0.0
    waiting_for: str = ""  # a sentence; empty when it does not wait
    lane: str = "grpc"  # how its tensors travel: "grpc", "direct" or "shared memory"
    codec: str = "raw"  # of its newest contribution
    # Over all its incarnations.
    contributions: int | None = None  # accepted; None: not known
    samples: int | None = 0  # None: as above
    compute_s: float = 0.0
    transfer_s: float = 0.0
    wait_s: float = 0.0
    staleness_mean: float = 0.0  # versions, over accepted contributions
    staleness_max: int = 0
    bytes_sent: int = 0  # by the worker
    bytes_received: int = 0
    restarts: int = 0


class Total(BaseModel):
    """What a status says of all ranks together."""

    loss: float | None = None  # mean over those that have one
    samples_per_s: float | None = 0.0  # None: not known of some


class Status(BaseModel):
    """The run at one moment. `step` is the smallest of the live workers, in training steps."""

    mode: str = ""
    version: int = 0
    elapsed_s: float = 0.0
    step: int = 0
    steps: int = 0  # of the run; 0: it goes on until the scripts' loops end
    num_joined: int = 0
    samples: int | None = 0  # of all ranks, over all starts of the server; None: not known of some
    num_bytes: int = 0  # exchanged with all of them
    evaluated: Point | None = None  # the newest evaluation
    waiting: str = ""  # a sentence: what everyone waits for; empty when somebody may compute
    workers: list[WorkerStatus] = Field(default_factory=list)  # of many, those that others wait for first
    left_out: int = 0  # ranks that are not among them
    total: Total | None = None  # of all ranks, where some are left out
    versions: list[int] = Field(default_factory=list)  # of each shard, where there are several
    held_bytes: list[int] = Field(default_factory=list)  # by each shard

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Status | None:
        """From the fields of an event of the log; None when they are not a status's. Unknown fields are for others."""
        try:
            return cls.model_validate(fields)
        except ValidationError:
            return None

    def fields(self) -> dict[str, Any]:
        """For an event of the log."""
        return self.model_dump(exclude={name for name in _OFTEN_EMPTY if not getattr(self, name)})

    @property
    def num_ranks(self) -> int:
        """Ranks that have taken part in the run, those that are gone included."""
        return len(self.workers) + self.left_out

    @computed_field  # type: ignore[prop-decorator]
    @property
    def loss(self) -> float | None:
        """Mean over the workers that have one."""
        if self.total is not None:
            return self.total.loss
        losses = [worker.loss for worker in self.workers if worker.loss is not None]
        return sum(losses) / len(losses) if losses else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def samples_per_s(self) -> float | None:
        if self.total:
            return self.total.samples_per_s
        return total_or_unknown([worker.samples_per_s for worker in self.workers])

    @computed_field  # type: ignore[prop-decorator]
    @property
    def eta_s(self) -> float | None:
        """Seconds left at the pace so far; None before the first step."""
        if not self.step or not self.steps:
            return None
        return self.elapsed_s / self.step * max(0, self.steps - self.step)

    def waiting_reason(self) -> str:
        """What everyone, or else the first waiting worker, waits for; empty when nobody does."""
        if self.waiting:
            return self.waiting
        held = [worker for worker in self.workers if worker.waiting_for]
        if not held:
            return ""
        more = f" (and {len(held) - 1} more)" if len(held) > 1 else ""
        return f"worker {held[0].rank}: {held[0].waiting_for}{more}"
