"""A contribution and a reply, each as one record nested by topic. Its maker builds it once, and it passes unopened to
whoever reads a topic.

The messages of the same names in proto/parameter_server.proto have the same fields. `messages.py` has a reader and a
writer for each topic. A new fact is a field here and in the proto, a line in both of these, and the code that uses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..kinds import ContributionKind

Record = TypeVar("Record")
_FIELDS: dict[type, Callable[[Any], tuple[Any, ...]]] = {}  # reads all fields of a class of records

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(frozen: bool):
        """A frozen dataclass for the type checker. At run time it is not: making one takes a tenth of the time, and
        five are made for every contribution."""
        return dataclass(slots=True, unsafe_hash=frozen)


def changed(item: Record, **topics: Any) -> Record:
    """A copy of a record with other topics. It takes half of the time of `dataclasses.replace`, and a small exchange
    makes seven."""
    kind = type(item)
    if (fields := _FIELDS.get(kind)) is None:
        fields = _FIELDS[kind] = attrgetter(*kind.__slots__)  # type: ignore[attr-defined]
    found = kind(*fields(item))
    for name, topic in topics.items():
        setattr(found, name, topic)
    return found


class ContributionId(NamedTuple):
    """Names one contribution of a run: an effect of it happens at most once."""

    rank: int
    incarnation: int
    seq: int  # of the rank's contributions, from 1


@record(frozen=True)
class Counts:
    """What a contribution counts as. Read by the policy and the counters."""

    num_samples: int = 1  # its weight in a mean; 0: unknown, and it weighs as 1
    num_training_steps: int | None = None  # None: as many as the worker was told
    num_batches: int | None = None  # drawn for it; None: one for each training step
    part: int = 0  # of a model that is stepped in parts, from 1

    @property
    def continues_step(self) -> bool:
        """It belongs to the training step of the rank's contribution before, which was of another part."""
        return self.part > 0 and self.num_training_steps == 0


@record(frozen=True)
class Base:
    """The weights that a contribution was computed on. Read by the policy and the store."""

    version: int = 0
    has_all: bool = False  # the worker still has all of them
    reference: int = 0  # number of the worker's reference; 0: none


@record(frozen=True)
class Timing:
    """Read by policies with deadlines, and by metrics."""

    compute_s: float = 0.0  # 0: unknown
    transfer_s: float = 0.0  # of the exchange before, without what the mode made it wait


@record(frozen=True)
class PayloadInfo:
    """How the payload travels. Read by the receiver and the store."""

    codec: str = ""  # empty: raw
    num_bytes: int = 0  # encoded
    in_shared_memory: bool = False
    without_gradient: tuple[int, ...] = ()  # positions in the model's specs of parameters that got none


@record(frozen=True)
class TrainingInfo:
    """How the server steps, what the worker wants with the reply, and its loss."""

    hyperparameters: tuple[dict[str, Any], ...] = ()  # of each group; empty: as before
    clip_norm: float = 0.0  # 2-norm that is stepped along at most; 0: any
    loss: float = math.nan  # mean since the last contribution
    wants_weights: bool = True
    evaluates: bool = False  # the weights of the reply


@record(frozen=True)
class ResidualInfo:
    """What the worker's codec keeps back, for the summary."""

    norm: float = 0.0
    num_lost: int = 0  # how often such was lost since this process began
    lost_norm: float = 0.0  # sum of the norms that were lost


@record(frozen=True)
class CompletionInfo:
    """That a group has averaged a gradient. Read by the policy of all-reduce."""

    generation: int = 0  # of the group; 0: the newest that the worker was told
    failed: bool = False  # there is no mean
    peer_bytes: int = 0  # sent to peers since the last completion


@record(frozen=True)
class FirstInfo:
    """What a process trains on, with its first contribution. Zeros: unknown."""

    num_samples: int = 0  # of the data set
    digest: int = 0  # of the first gradients
    run_steps: int = 0  # training steps of the run, as this worker counts them
    rates: tuple[float, ...] = ()  # learning rates at the process's first training step


@record(frozen=True)
class Position:
    """Where a rank was when a contribution began."""

    step: int = 0  # training steps behind it
    local_steps: int = 0  # in the contribution
    batches: int = 0  # of its data that were behind it
    epoch: int | None = None  # from 0; None where the script has no loop over epochs
    epoch_batches: int = 0  # of the epoch that were behind it


_COUNTS, _BASE, _TIMING, _PAYLOAD = Counts(), Base(), Timing(), PayloadInfo()
_TRAINING, NO_RESIDUAL, NO_COMPLETION = TrainingInfo(), ResidualInfo(), CompletionInfo()


@record(frozen=True)
class Contribution:
    """One unit of work, whole. `kind` says what the payload holds."""

    id: ContributionId = ContributionId(0, 0, 0)
    kind: ContributionKind = ContributionKind.GRADIENT
    counts: Counts = _COUNTS
    base: Base = _BASE
    timing: Timing = _TIMING
    payload: PayloadInfo = _PAYLOAD
    training: TrainingInfo = _TRAINING
    residual: ResidualInfo = NO_RESIDUAL
    completion: CompletionInfo = NO_COMPLETION
    first: FirstInfo | None = None
    position: Position | None = None  # of a script that remembers something


# ---- replies ------------------------------------------------------------------------------------------


class Outcome(IntEnum):
    """What became of a contribution. The values are those of Reply.Outcome in the proto."""

    START = 1
    APPLIED = 2
    REPEATED = 3
    DROPPED = 4
    REJECTED = 5


COUNTED = (Outcome.APPLIED, Outcome.REPEATED)


class RateInfo(NamedTuple):
    """Learning rates of one rank's contributions; one number for each group of its optimizer."""

    first: tuple[float, ...]  # at the first training step of its first process
    last: tuple[float, ...]  # of its newest contribution that counts
    num_changes: int  # contributions that count whose rates differ from those of the one before


@record(frozen=True)
class Result:
    """What became of the rank's newest contribution."""

    outcome: Outcome
    seq: int  # contributions of the rank that count
    version: int  # of the weights that follow, or of the server
    staleness: int = 0
    gate_wait_s: float = 0.0
    reason: str = ""


@record(frozen=True)
class NextWork:
    """What the worker does until its next contribution."""

    local_steps: int  # 0: all are done
    training_steps: int  # of the rank that count
    num_workers: int = 1  # how the data is divided
    worker_index: int = 0
    run_steps: int | None = None  # training steps of the run, where it has a length
    has_evaluator: bool = False  # a process that does not train evaluates
    same_batches_as: int | None = None  # a rank whose first gradients are equal to this one's


@record(frozen=True)
class ReferenceInfo:
    """The payload leads to reference `number`; that of number `checked` has this CRC-32."""

    number: int
    checked: int = 0
    crc: int = 0
    # Of each difference, tensors of the model that it has nothing of, by position in its specs; none: each is whole.
    left_out: tuple[tuple[int, ...], ...] = ()


@record(frozen=True)
class WeightsInfo:
    """How the weights of a reply travel."""

    num_bytes: int  # encoded
    codec: str = ""  # empty: raw
    segment: Any = None  # Segment of the proto: the weights lie there
    reference: ReferenceInfo | None = None  # None: they are the server's own


@record(frozen=True)
class GroupInfo:
    """The group that a worker averages in from here on."""

    generation: int = 0
    members: tuple[int, ...] = ()  # ranks, ascending
    rendezvous: str = ""  # HOST:PORT
    has_weights: bool = True  # the server has the weights of the newest version
    uploads_weights: bool = False  # with the next completion of this worker
    uploads_optimizer: bool = False  # with any that uploads weights
    secret: bytes = b""  # made by the server's wire: the run has none


@record(frozen=True)
class StartInfo:
    """Where a process begins."""

    num_batches: int | None = None  # of the rank's data that are behind it; None: as many as training steps
    in_step: int = 0  # contributions that count of the training step it begins with
    rates: RateInfo | None = None
    position: Position | None = None  # of a script that remembers something


@record(frozen=True)
class Reply:
    """Lets one worker go on."""

    result: Result
    next_work: NextWork
    weights: WeightsInfo | None = None  # None: none follow, or the wire has not chosen how yet
    group: GroupInfo | None = None
    start: StartInfo | None = None

    @property
    def has_new_weights(self) -> bool:
        """The worker computes on `result.version` from here on: its peers' weights, new ones, or those it has as its
        reference."""
        return self.weights is not None or self.group is not None
