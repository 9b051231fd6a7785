"""Records of a contribution and of a reply, nested by topic.

One function builds a record, and each reader takes only its topic from it. The messages of the same names in
proto/parameter_server.proto have the same fields, and `messages.py` converts each topic. To add a field, write it here
and in the proto, and add it to the writer and the reader in `messages.py` if they name the topic's fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..kinds import ContributionKind

MAX_WORK = 64 << 10  # characters of `FirstInfo.work`

Record = TypeVar("Record")
_FIELDS: dict[type, Callable[[Any], tuple[Any, ...]]] = {}  # for each record class, a getter of all fields

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(frozen: bool):
        """Make a dataclass that is frozen for the type checker, but not at run time.

        An instance that is not frozen takes a tenth of the time to make, and every contribution needs five.
        """
        return dataclass(slots=True, unsafe_hash=frozen)


def changed(item: Record, **topics: Any) -> Record:
    """Return a copy of a record with some topics replaced.

    It takes half the time of `dataclasses.replace`, and a small exchange makes seven copies.
    """
    kind = type(item)
    if (fields := _FIELDS.get(kind)) is None:
        fields = _FIELDS[kind] = attrgetter(*kind.__slots__)  # type: ignore[attr-defined]
    found = kind(*fields(item))
    for name, topic in topics.items():
        setattr(found, name, topic)
    return found


class ContributionId(NamedTuple):
    """Identifies one contribution of a run. The server applies it at most once."""

    rank: int
    incarnation: int
    seq: int  # sequence number among the rank's contributions, from 1


@record(frozen=True)
class Counts:
    """Samples, training steps and batches of a contribution. The policy and the counters read it."""

    num_samples: int = 1  # weight in a mean; 0: unknown, which weighs as 1
    num_steps: int = 1  # training steps; 0: the rank's previous contribution, of another part, has the step
    num_batches: int = 1  # batches that the worker used
    part: int = 0  # number of the optimizer that steps a part of the model, from 1; 0: one optimizer steps all
    num_workers: int = 1  # workers whose mean this is; several in a contribution of a region's relay

    @property
    def continues_step(self) -> bool:
        """Whether the contribution belongs to the same training step as the rank's previous one, of another part."""
        return self.part > 0 and self.num_steps == 0

    @property
    def new_samples(self) -> int | None:
        """Samples that no contribution of the same training step has counted; None: unknown."""
        return 0 if self.continues_step else (self.num_samples or None)


class Row(NamedTuple):
    """What counts of one rank. The server keeps it as counted and as committed, and the worker as of the newest reply.

    A rank that is new, or that missed a round, is at the training step and the batch of the others.
    """

    seq: int = 0  # sequence number of its newest contribution
    steps: int = 0  # training steps
    samples: int | None = 0  # in its contributions; None: one came without a number
    batches: int = 0
    part: int = 0  # contributions of its newest training step, of a model that is stepped in parts

    def plus(self, counts: Counts) -> Row:
        """Returns the row with one more contribution."""
        seq, steps, samples, batches, part = self
        added = counts.new_samples if counts.part else counts.num_samples or None
        samples = None if samples is None or added is None else samples + added
        part = (part + 1 if counts.continues_step else 1) if counts.part else 0
        return Row(seq + 1, steps + counts.num_steps, samples, batches + counts.num_batches, part)

    def at(self, other: Row) -> Row:
        """Returns the row of a rank that goes on at the training step and the batch of another one."""
        return self._replace(steps=other.steps, batches=other.batches, part=other.part)


NO_ROW = Row()


@record(frozen=True)
class Base:
    """The weights that a contribution was computed on. The policy and the store read it."""

    version: int = 0
    has_all: bool = False  # the worker still has all weights of this version
    reference: int = 0  # number of the worker's reference; 0: none


@record(frozen=True)
class Timing:
    """Seconds that the worker measured. Policies with deadlines and metrics read it."""

    compute_s: float = 0.0  # 0: unknown
    transfer_s: float = 0.0  # of the previous exchange, without the time in which the mode made the worker wait


@record(frozen=True)
class PayloadInfo:
    """How the payload travels. The receiver and the store read it."""

    codec: str = ""  # empty: raw
    num_bytes: int = 0  # of the encoded payload
    in_shared_memory: bool = False
    without_gradient: tuple[int, ...] = ()  # parameters that got no gradient, as positions in the model's specs


@record(frozen=True)
class TrainingInfo:
    """Settings of the server's step, requests for the reply, and the worker's loss."""

    hyperparameters: tuple[dict[str, Any], ...] = ()  # of each parameter group; empty: unchanged
    clip_norm: float = 0.0  # the server clips the gradient to this 2-norm; 0: no clipping
    loss: float = math.nan  # mean since the last contribution
    wants_weights: bool = True  # the reply must carry weights
    wants_exact: bool = False  # these weights must be exactly those of the reply's version: the worker measures them
    iteration: int = 0  # steps of the process's loop, taken or not: where its schedules are; 0: unknown


@record(frozen=True)
class ResidualInfo:
    """The residual of the worker's codec, for the summary."""

    norm: float = 0.0
    num_lost: int = 0  # residuals that this process lost
    lost_norm: float = 0.0  # sum of their norms


@record(frozen=True)
class CompletionInfo:
    """Result of averaging a gradient among peers. The policy of `allreduce` reads it."""

    generation: int = 0  # of the group; 0: the newest that the worker knows
    failed: bool = False  # the peers have no mean
    peer_bytes: int = 0  # bytes sent to peers since the last completion


@record(frozen=True)
class FirstInfo:
    """Facts about a new process, sent with its first contribution. Zero means unknown."""

    num_samples: int = 0  # size of the data set
    digest: int = 0  # of the first gradients; equal digests mean equal batches
    run_steps: int = 0  # training steps of the run, as this worker counts them
    rates: tuple[float, ...] = ()  # learning rates at the process's first training step
    work: str = ""  # what the process runs, as JSON; only the record reads it (`runstore/record.py`)


@record(frozen=True)
class Position:
    """The position of a rank in its data when a contribution began."""

    step: int = 0  # training steps done before
    local_steps: int = 0  # training steps in the contribution
    batches: int = 0  # batches used before, in all epochs
    epoch: int | None = None  # from 0; None if the script has no loop over epochs
    epoch_batches: int = 0  # batches of this epoch used before


_COUNTS, NO_BASE, NO_TIMING, NO_PAYLOAD = Counts(), Base(), Timing(), PayloadInfo()
_TRAINING, NO_RESIDUAL, NO_COMPLETION = TrainingInfo(), ResidualInfo(), CompletionInfo()


@record(frozen=True)
class Contribution:
    """One contribution of a worker. `kind` says what the payload holds."""

    id: ContributionId = ContributionId(0, 0, 0)
    kind: ContributionKind = ContributionKind.GRADIENT
    counts: Counts = _COUNTS
    base: Base = NO_BASE
    timing: Timing = NO_TIMING
    payload: PayloadInfo = NO_PAYLOAD
    training: TrainingInfo = _TRAINING
    residual: ResidualInfo = NO_RESIDUAL
    completion: CompletionInfo = NO_COMPLETION
    first: FirstInfo | None = None
    position: Position | None = None  # only for a script that saves state


# ---- replies ------------------------------------------------------------------------------------------


class Outcome(IntEnum):
    """What the server did with a contribution. The values equal Reply.Outcome in the proto."""

    START = 1
    APPLIED = 2
    REPEATED = 3
    DROPPED = 4
    REJECTED = 5


COUNTED = (Outcome.APPLIED, Outcome.REPEATED)


class RateInfo(NamedTuple):
    """Learning rates of one rank: one number for each group of its optimizer."""

    first: tuple[float, ...]  # at the first training step of the rank's first process
    last: tuple[float, ...]  # of the rank's newest counted contribution
    num_changes: int  # counted contributions whose rates differ from the previous ones


@record(frozen=True)
class Result:
    """Result of the rank's newest contribution."""

    outcome: Outcome
    seq: int  # sequence number of the rank's newest counted contribution
    version: int  # of the weights in this reply; without weights, the server's version
    staleness: int = 0
    gate_wait_s: float = 0.0
    reason: str = ""


@record(frozen=True)
class NextWork:
    """Work of the worker until its next contribution."""

    local_steps: int  # training steps to take; 0: the run has all its steps
    training_steps: int  # counted training steps of this rank
    num_workers: int = 1  # the data is divided among so many workers
    worker_index: int = 0  # this worker's share of the data, from 0
    run_steps: int | None = None  # training steps of the run; None: no limit
    is_asked: bool = False  # for metrics of the weights: of all workers one, unless another process evaluates
    same_batches_as: int | None = None  # a rank that sent the same first gradients as this rank


@record(frozen=True)
class ReferenceInfo:
    """The reference that the payload leads to, and a checksum of an earlier reference."""

    number: int  # of the reference after this payload
    checked: int = 0  # number of the reference that `crc` belongs to
    crc: int = 0  # CRC-32
    # For each difference, the tensors it leaves out, as positions in the model's specs. Empty: all are complete.
    left_out: tuple[tuple[int, ...], ...] = ()


@record(frozen=True)
class WeightsInfo:
    """How the weights of a reply travel."""

    num_bytes: int  # of the encoded weights
    codec: str = ""  # empty: raw
    segment: Any = None  # pb.Segment with the weights; None: they follow as bytes
    reference: ReferenceInfo | None = None  # None: the payload is the weights, not differences to a reference


@record(frozen=True)
class GroupInfo:
    """The group of peers in which the worker averages from now on."""

    generation: int = 0
    members: tuple[int, ...] = ()  # ranks, ascending
    rendezvous: str = ""  # HOST:PORT
    has_weights: bool = True  # the server has the weights of the newest version
    uploads_weights: bool = False  # this worker uploads weights with its next completion
    uploads_optimizer: bool = False  # an upload of weights also has the optimizer's state
    secret: bytes = b""  # the server's wire adds it; the run does not know it
    returns_weights: bool = False  # weights follow an upload to all members, and replace those of their step


@record(frozen=True)
class StartInfo:
    """The position where a new process begins."""

    num_batches: int = 0  # batches that the rank used before
    in_step: int = 0  # counted contributions of the training step that the process continues
    rates: RateInfo | None = None
    position: Position | None = None  # only for a script that saves state


@record(frozen=True)
class Reply:
    """The server's reply, which lets one worker continue."""

    result: Result
    next_work: NextWork
    weights: WeightsInfo | None = None  # None: no weights follow, or the wire has not chosen the encoding yet
    group: GroupInfo | None = None
    start: StartInfo | None = None

    @property
    def has_new_weights(self) -> bool:
        """Whether the worker now computes on `result.version`, with weights of this reply or of its peers."""
        return self.weights is not None or self.group is not None
