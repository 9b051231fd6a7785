"""Memory of complete contributions until they are folded or discarded, and the scripts' states that come with them.

Also `Peer`, the stream of a worker as the engine knows it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from ...common.codecs.base import Codec, FreeBuffers
from ...common.codecs.shared.reference import moves_reference
from ...common.errors import ParamServerError
from ...common.reporting.log import get_logger
from ...common.tensors.judgement import overflowed
from ...common.tensors.layout import Layout
from ...common.tensors.optimizers import OptimizerSpec
from ...common.wire.records import Contribution, ContributionId, Row
from ...common.wire.segments import Segment
from ..core import effects
from ..core.counting import Traffic
from ..policies.base import Policy
from ..tensors.flat_optimizer import OptimizerState
from ..tensors.model import Model
from ..tensors.replies import Publication, ReferenceUpdate
from ..tensors.sanity import Unsound
from ..tensors.store import Rows, Step
from ..tensors.thread import TensorThread

log = get_logger()

_FEW = "too few contributions to leave out so many (policy.aggregation): fewer faulty workers are tolerated"


# Makes the version of a commit elsewhere: in another run, of which this one is a worker (`relay/region.py`). It gets a
# function that steps the store and returns payloads that may be reused, where the version is to be published, and the
# names of parameters that have no gradient in any contribution.
Committer = Callable[[effects.Commit, Callable[..., list[torch.Tensor]], Publication, frozenset[str]], object]


@dataclass(slots=True)
class Staged:
    """The tensors of a complete contribution, until they are folded or dropped."""

    payload: torch.Tensor | None  # None: it has none
    without: frozenset[str] = frozenset()  # names of parameters that got no gradient: zeros in the payload
    rows: Sequence[Rows] = ()
    optimizer: OptimizerState | None = None  # the state of its worker's optimizer, if the worker steps
    slot: torch.Tensor | None = None  # of the staging pool, for rows or state beside a payload in the worker's memory
    script: bytes | None = None  # the state of its worker's script; None: as with its contribution before
    is_kept: bool = False  # its contribution counts, so it outlasts its worker


# Idle buffers for encoded payloads: as many as are staged by default, whatever the number of workers.
_MAX_FREE_BUFFERS = 4


class Folding:
    """Stages and folds contributions, and steps the weights. Payloads are uint8 [exchange_bytes]."""

    def __init__(
        self,
        model: Model,
        tensors: TensorThread,
        policy: Policy,
        measured: Callable[[int, float], None] = lambda version, norm: None,
    ) -> None:
        """`measured` receives the norm of this shard's part of each mean."""
        self._model, self._tensors, self._measured = model, tensors, measured
        self._policy, self.states = policy, States()
        self.free_buffers = FreeBuffers(_MAX_FREE_BUFFERS)  # for encoded payloads
        self._staged: dict[ContributionId, Staged] = {}
        self._fenced: dict[int, int] = {}  # by rank, the newest fenced incarnation
        self.committer: Committer | None = None  # None: versions are made here
        self._without: frozenset[str] | None = None  # parameters without a gradient in all folded contributions
        self._are_few = False  # contributions of the newest commit
        self._steps: dict[int, partial[list[torch.Tensor]]] = {}  # of commits whose mean is measured, by version

    def is_fenced(self, rank: int, incarnation: int) -> bool:
        return self._fenced.get(rank, 0) >= incarnation

    def stage(self, id: ContributionId, staged: Staged) -> None:
        """Take over the tensors of a contribution."""
        if (self._fenced and self.is_fenced(id.rank, id.incarnation)) or id in self._staged:
            self._return(staged.payload, staged.slot)  # its process was released, or it is a repeat
        else:
            self._staged[id] = staged

    def taken(self, taken: effects.ContributionTaken) -> None:
        """Keep the tensors of a contribution until they are folded, or drop them. Keep the state of its script."""
        contribution, outcome = taken.contribution, taken.outcome
        id = contribution.id
        staged = self._staged.get(id)
        if staged is not None and outcome == "accepted" and contribution.kind.has_payload:
            staged.is_kept = True
        else:
            self._drop(id)
        has_state = contribution.position is not None or id.rank in self.states.of_rank
        if has_state and outcome in ("accepted", "skipped"):
            script = staged.script if staged is not None else None
            self.states.counted(contribution, script, self._policy.committed[id.rank].seq)

    def _drop(self, id: ContributionId) -> None:
        if id in self._staged and not self._staged[id].is_kept:
            staged = self._staged.pop(id)
            self._return(staged.payload, staged.slot)

    def _return(self, *payloads: torch.Tensor | None) -> None:
        for payload in payloads:
            if payload is not None:
                self._model.staging.give_back(payload)

    def fence(self, rank: int, incarnation: int) -> None:
        """Take nothing more of this incarnation of a rank and of older ones."""
        self._fenced[rank] = max(incarnation, self._fenced.get(rank, 0))
        for id in [found for found in self._staged if found.rank == rank and found.incarnation <= incarnation]:
            self._drop(id)

    def fold(self, fold: effects.Fold) -> None:
        store, staging = self._model.store, self._model.staging
        staged = self._staged.pop(fold.id)
        payload, without = staged.payload, staged.without
        assert payload is not None
        self._without = without if self._without is None else self._without & without
        may_keep = not staging.is_own(payload)
        # its worker writes there when it gets its reply, and may keep it as a gradient
        is_copied = may_keep and (self._policy.replies_before_commit or fold.scale != 1.0)

        def work() -> list[torch.Tensor]:
            taken = payload.clone() if is_copied else payload
            if not self._model.kind.has_payload:
                store.bring(staged.optimizer)
            if fold.scale != 1.0:
                store.sanity.scale(taken, fold.scale)
            return store.fold(
                taken, fold.weight, fold.id.rank, may_keep, without, staged.rows, may_keep and not is_copied
            )

        def folded(reusable: list[torch.Tensor]) -> None:
            if id(payload) not in map(id, reusable):
                staging.donate(payload)
            if reusable or staged.slot is not None:
                self._return(*reusable, staged.slot)

        self._tensors.submit(work, folded)

    def commit(self, commit: effects.Commit) -> None:
        model, store, count = self._model, self._model.store, len(commit.contributions)
        if model.references.is_used:
            model.references.committed(count, commit.num_active, self._without)
        without, self._without = self._without, None
        if count >= store.fewest:
            self._are_few = False  # so that the next commit of too few is warned of again
        elif count and not self._are_few:
            self._are_few = True
            log.warning("few_contributions", count=count, fewest=store.fewest, meaning=_FEW)
        num_live, lowest_live = commit.num_active, commit.members[0] if commit.members else 0
        if not model.kind.has_payload:  # one worker uploads the weights, with the lowest rank's buffers
            num_live, lowest_live = 1, sys.maxsize
        step = Step(
            num_live, lowest_live, commit.hyperparameters, commit.lr_scale, commit.momentum_among, commit.clip_norm
        )
        work = partial(_sound, commit, store.commit, step)
        if model.is_published or self.committer is not None:
            publication = model.publisher.next(commit.version)
            if without is not None:
                steps_here = store.optimizer is not None and self.committer is None
                model.changes.made(commit.version, without if steps_here else ())
            work = partial(work, target=publication.segment.payload)
            if self.committer is not None:
                self.committer(commit, work, publication, without or frozenset())
                return
            work = partial(work, progress=publication.made)
        if not (model.is_part and count and (commit.clip_norm or store.clip_norm)):
            self._tensors.submit(work, model.staging.reclaim)
            return
        # The weights stay unused until all shards have reported the norms of their parts.
        self._steps[commit.version] = work
        self._tensors.submit(store.measure, partial(self._measured, commit.version), pauses=True)

    def clip(self, clip: effects.Clip) -> None:
        self._tensors.go_on(partial(self._steps.pop(clip.version), norm=clip.norm), self._model.staging.reclaim)


def _sound(
    commit: effects.Commit, make: Callable[..., list[torch.Tensor]], step: Step, **options: Any
) -> list[torch.Tensor]:
    """Make the version of a commit. Raises DivergedError where its step leaves weights that are not finite."""
    try:
        return make(step, **options)
    except Unsound as unsound:
        numbers = dict(commit.hyperparameters[0]) if commit.hyperparameters else {}
        if "lr" in numbers:
            numbers["lr"] *= commit.lr_scale
        raise overflowed(commit.version, str(unsound), commit.contributions, numbers) from None


class Kept(NamedTuple):
    """The beginning of a contribution: fields of Position in the proto, and the script's state."""

    position: dict[str, int]
    payload: bytes


class States:
    """Keeps the scripts' states that come with contributions, for the next process of a rank. The bytes are opaque.

    A state counts when its contribution does. States that a snapshot may need are kept."""

    def __init__(self) -> None:
        self.of_rank: dict[int, dict[int, Kept]] = {}  # by rank, and number of the contribution that began so

    def counted(self, contribution: Contribution, payload: bytes | None, num_committed: int) -> None:
        """Keep the state of a contribution that counts; None: it is that of the rank's contribution before.
        `num_committed` of its rank's are in a version."""
        rank, position = contribution.id.rank, contribution.position
        kept = self.of_rank.get(rank, {})
        if payload is None and kept:
            payload = kept[max(kept)].payload
        if position is None or payload is None:
            self.of_rank.pop(rank, None)  # the script has no state
            return
        fields = {name: value for name, value in asdict(position).items() if value is not None}
        kept[contribution.id.seq] = Kept(fields, payload)
        oldest = max((number for number in kept if number <= num_committed), default=0)
        self.of_rank[rank] = {number: snapshot for number, snapshot in kept.items() if number >= oldest}

    def at(self, rank: int, number: int) -> Kept | None:
        """Returns the state at the beginning of this contribution of the rank, or of the newest one before it."""
        kept = self.of_rank.get(rank, {})
        found = max((snapshot for snapshot in kept if snapshot <= number), default=None)
        return kept[found] if found is not None else None

    def saved(self, contributions: Mapping[int, int]) -> dict[int, Kept]:
        """Returns the states for a snapshot that has so many contributions of each rank."""
        found = {rank: self.at(rank, number) for rank, number in contributions.items()}
        return {rank: item for rank, item in found.items() if item is not None}

    def restore(self, rows: Mapping[int, Row], places: Any, payloads: Mapping[int, bytes]) -> None:
        """Restore the states of a snapshot; malformed positions are dropped."""
        for rank, payload in payloads.items():
            position = places.get(str(rank)) if isinstance(places, dict) else None
            if isinstance(position, dict) and all(type(number) is int and number >= 0 for number in position.values()):
                self.of_rank[rank] = {rows[rank].seq if rank in rows else 0: Kept(position, payload)}


# ---- peers ---------------------------------------------------------------------------------------
# The streams of workers, by which the run's effects find them, and the items that a stream may carry.
#
# The service turns each item into messages; the engine knows no messages. A `Peer` is the stream of one worker, in
# every mode. The peers of all-reduce are something else.


class Go(NamedTuple):
    """Lets the worker continue. Its weights come from `payload` (small ones), from `publication`, from the newest
    version, or as an `update` of the reference; or there are none."""

    effect: effects.SendReply
    payload: bytes | None = None
    publication: Publication | None = None
    update: ReferenceUpdate | None = None


class Done(NamedTuple):
    """The run is over; the weights are final."""

    min_version: int
    is_asked: bool  # for metrics of them


# Items of a stream. A text is the reason that the worker still waits.
Item = str | effects.AskForWeights | Go | Done


@dataclass(frozen=True)
class ShardState:
    """A shard's memory in `bytes`, by kind, and its `traffic`: by rank, bytes received from the worker and sent."""

    version: int
    bytes: dict[str, int] = field(default_factory=dict)
    traffic: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(eq=False)
class Peer:
    """One stream of a worker. `state` is text for people: joining, waiting, uploading, computing, finished."""

    rank: int
    incarnation: int
    is_resumed: bool = False  # continues where it was: no START is due
    number: int = 0  # contributions of the rank that count
    num_workers: int = 0  # for which it stands, if it is the server of others
    base: int | None = None  # the version that it has all of the weights of, if it has said so
    traffic: Traffic = field(default_factory=Traffic)
    outbox: asyncio.Queue[Item] = field(default_factory=asyncio.Queue)
    at_once: Callable[[Item], bool] | None = None  # says an item now, or (False) leaves it to the outbox
    state: str = "joining"
    offer: tuple[Layout, OptimizerSpec] | None = None  # its model and optimizer
    reference: int = 0  # the number of its reference; 0: none
    weights: Segment | None = None  # the initial ones, once it has uploaded them
    takes_frames: bool = True  # its replies are frames on the stream, or it reads the weights' own memory
    # By name of a codec of contributions: the reason that it is refused, or "".
    codecs: dict[str, str] = field(default_factory=dict)
    reply_codec: Codec | None = None  # of its weights, except for START and the final ones; None: raw
    hang_up: Callable[[ParamServerError | None], object] = lambda error: None  # ends its call, with a refusal
    is_ended: bool = False

    @property
    def seat(self) -> tuple[int, int]:
        """Rank and incarnation."""
        return self.rank, self.incarnation

    def encodes(self, effect: effects.SendReply) -> bool:
        """Whether this reply's weights are encoded for this worker alone. Weights to be evaluated are exact where the
        worker would otherwise have those of a reference."""
        if self.reply_codec is None:
            return False
        return not effect.is_exact if moves_reference(self.reply_codec) else not effect.is_start

    def as_frames(self, effect: effects.SendReply) -> bool:
        """Whether the reply's weights are frames that workers share, or are read from the weights' own memory."""
        return effect.is_start or (self.takes_frames and not self.encodes(effect))

    def say(self, item: Item) -> None:
        """Send an item now, or queue it for the worker."""
        if self.at_once is None or not self.at_once(item):
            self.outbox.put_nowait(item)

    def end(self, error: ParamServerError | None = None) -> None:
        """End its call once, with a refusal if there is an error."""
        if not self.is_ended:
            self.is_ended = True
            self.hang_up(error)
