"""The status of a run at one moment: one type from the server (or a run without a server) to the screen.

The log event `status`, the reply to the call Status (proto/parameter_server.proto) and the launcher's view use it. Its
numbers are the metrics of `metrics.py`, as attributes by their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field, model_validator

from .curve import MetricValue, Point
from .folding import Presence, folded
from .metrics import OF_RUN, OF_WORKER, Display, Metric, Value, completed

RECORDED = "recorded."  # before the name of a metric that a script records
_OFTEN_EMPTY = ("versions", "shard_bytes", "evaluated", "left_out", "recorded")


def names_of(workers: Sequence[WorkerStatus]) -> str:
    """`worker 1, 2`, or `region eu, us`."""
    kind = "region" if workers[0].region else "worker"
    return f"{kind} {', '.join(worker.region or str(worker.rank) for worker in workers)}"


class Measured(BaseModel):
    """A record with metrics beside its fields: attributes with the names of the table.

    A missing metric is that of the record's `workers` together, if it has them; else it is derived from others, or has
    its default. Unknown names are ignored.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int | float | None] = Field(init=False)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def declared_metrics(cls) -> list[Metric]:
        """Returns the metrics that such a record has."""
        return [metric for metric in OF_RUN.values() if not metric.of_run or metric.display & Display.STATUS]

    def row(self) -> dict[str, Value]:
        """All metrics by name."""
        return dict(self.model_extra or {})

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Returns a record of values that need no validation."""
        made: Any = cls.model_construct(**values | completed(cls.declared_metrics(), values))
        return made

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {*cls.model_fields, *(metric.name for metric in cls.declared_metrics())}
        return {name: value for name, value in data.items() if name in known}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        extra, workers = self.__pydantic_extra__, getattr(self, "workers", ())
        added = folded(workers, lambda metric, worker: worker.row()[metric.name]) if workers else {}
        extra.update(completed(self.declared_metrics(), added | extra))
        return self


class WorkerStatus(Measured):
    """One rank: at one moment (status) or at the end (summary). Sums are over all its incarnations."""

    rank: int
    state: str = ""  # joining, computing, uploading, waiting, away, finished, gone
    state_s: float = 0.0  # seconds since it began to compute or to wait
    waiting_for: str = ""  # a sentence; empty when it does not wait
    transport: str = "grpc"  # how its tensors travel: "grpc", "direct" or "shared memory"
    transport_reason: str = ""  # why it is not the transport that the worker prefers
    codec: str = "raw"  # of its newest contribution; auto's choice
    region: str = ""  # whose relay it is
    recorded: dict[str, MetricValue] = Field(default_factory=dict)  # by its script: `session.record(name=...)`

    @property
    def presence(self) -> Presence:
        """Of a record without a state, such as one of a summary, all take part."""
        return Presence(is_live=self.state not in ("finished", "gone"), is_lost=self.state == "gone")

    @property
    def label(self) -> str:
        """Its rank, and its region's name if that is another: `1`, `1 us`."""
        return str(self.rank) if self.region in ("", str(self.rank)) else f"{self.rank} {self.region}"

    @classmethod
    def declared_metrics(cls) -> list[Metric]:
        return list(OF_WORKER.values())


class Status(Measured):
    """The run at one moment. `step` is the smallest of the live workers, in training steps."""

    mode: str = ""
    evaluated: Point | None = None  # the newest evaluation
    recorded: dict[str, MetricValue] = Field(default_factory=dict)  # by scripts: mean of the workers that have it
    waiting: str = ""  # a sentence: what everyone waits for; empty when somebody may compute
    workers: list[WorkerStatus] = Field(default_factory=list)  # of many workers, first the workers that others wait for
    left_out: int = 0  # number of ranks not in `workers`
    versions: list[int] = Field(default_factory=list)  # of each shard, if there are several
    shard_bytes: list[int] = Field(default_factory=list)  # memory of each shard

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Status | None:
        """Parse the fields of a log event. Returns None if they are not a status. Unknown fields are ignored."""
        try:
            return cls.model_validate(dict(fields))
        except ValidationError:
            return None

    def fields(self) -> dict[str, Any]:
        """Returns the fields for a log event."""
        return self.model_dump(exclude={name for name in _OFTEN_EMPTY if not getattr(self, name)})

    @property
    def num_ranks(self) -> int:
        """Number of ranks that took part in the run, including departed ranks."""
        return len(self.workers) + self.left_out

    @computed_field  # type: ignore[prop-decorator]
    @property
    def eta_s(self) -> float | None:
        """Seconds left at the pace so far; None before the first step."""
        if not self.step or not self.steps:
            return None
        return float(self.elapsed_s / self.step * max(0, self.steps - self.step))

    def waiting_reason(self) -> str:
        """Returns why all workers wait, or else the first waiting worker; empty if none waits."""
        if self.waiting:
            return self.waiting
        waiting = [worker for worker in self.workers if worker.waiting_for]
        rest = f" (and {len(waiting) - 1} more)" if len(waiting) > 1 else ""
        return f"{names_of(waiting[:1])}: {waiting[0].waiting_for}{rest}" if waiting else ""
