"""A run's model: the layout and the optimizer that all workers agree on, the store, and memory for versions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...common.config.schema import Config
from ...common.errors import ParamServerError, Reason, refusal
from ...common.registry import AGGREGATIONS
from ...common.reporting.log import get_logger
from ...common.tensors.layout import FlatRun, Kind, Layout, as_bytes
from ...common.tensors.optimizers import (
    GroupSpec,
    Hyperparameters,
    OptimizerSpec,
    TableSpec,
    check_hyperparameters,
    find_optimizer,
)
from ...common.tensors.sharding import Share, divide
from ...common.tensors.tables import make_spec
from ...common.wire.frames import INLINE_BYTES
from ...common.wire.segments import Segment, SegmentError, new_segment, private_segment
from ..core.judgement import Limits
from ..policies.base import Policy
from .replies.delivered import Delivered
from .replies.publication import Changes, Publisher
from .replies.reference import References
from .staging import StagingPool
from .store import Store, StoreOptions
from .tables import Tables
from .thread import TensorThread

log = get_logger()

_NUM_NAMED = 8
_NOT_AVERAGED = (
    "they are those of the lowest live rank; running statistics of layers of your own are averaged where "
    "session.optimizer(..., averaged_buffers=[...]), or a task's averaged_buffers, names them"
)


class Model:
    """The run's model. `store`, `staging`, `publisher`, `changes` and `references` exist once there are weights.

    The mode's `policy` says who steps. Workers contribute gradients, and their optimizer runs here. Or `policy.outer`
    steps along their deltas. Or workers step, and may send their optimizer's state.
    """

    store: Store
    staging: StagingPool
    publisher: Publisher
    changes: Changes
    references: References

    def __init__(self, config: Config, tensors: TensorThread, policy: Policy) -> None:
        self._config, self._tensors = config, tensors
        self.kind = policy.kind
        self._may_sum, self._has_rounds, self._has_fragments = policy.may_sum, policy.has_rounds, policy.fragments > 1
        self._outer, self._compensation = policy.outer, policy.compensation
        self.delivered: Delivered | None = None  # where late gradients are compensated
        self.whole: Layout | None = None  # the workers' model
        self.whole_optimizer: OptimizerSpec | None = None
        self.share: Share | None = None  # the part of it that is here: all, in a server of one process
        self.optimizer: OptimizerSpec | None = None  # the workers', over the share
        self.has_weights = False
        self.source = ""  # the snapshot it comes from
        self.may_change = False  # the first worker of a run that goes on sets the optimizer's numbers anew
        self._tables: Tables | None = None
        self._small_payload: tuple[int, bytes] = (-1, b"")  # with its version

    def clips_parts(self, clip_norm: float) -> bool:
        """Whether a step is clipped by its norm over all shards; `clip_norm` is the workers' own, 0: none."""
        return bool(clip_norm or self._config.store.clip_norm) and self._config.server.shards > 1

    @property
    def layout(self) -> Layout | None:
        """The layout of the payloads here."""
        return self.share.layout if self.share is not None else None

    @property
    def outer(self) -> OptimizerSpec | None:
        """The server's own optimizer, over the share; None where the workers' runs here, or none does."""
        return outer_spec(self._outer.name, self._outer.arguments, self.layout) if self._outer and self.layout else None

    @property
    def running(self) -> OptimizerSpec | None:
        """The optimizer that runs here, or whose state is kept here for the workers."""
        return self.outer or (self.optimizer if not self.kind.worker_steps or self._can_be_kept() else None)

    def _can_be_kept(self) -> bool:
        """Whether the state of the workers' optimizer can lie here: torch knows it, and it works element by element."""
        if not self.kind.has_peers or self.optimizer is None or self.optimizer.tables:
            return False
        try:
            _check_known(self.optimizer)
        except ParamServerError:
            return False
        return True

    # ---- what all workers agree on --------------------------------------------------------

    def check(self, rank: int, layout: Layout, optimizer: OptimizerSpec) -> None:
        """Refuse a model and optimizer that are not the run's; while there are none, those that it cannot have."""
        if self.whole is None or self.whole_optimizer is None:
            self.check_optimizer(optimizer)
            self._check_size(self.share_of(layout), optimizer)
            return
        if layout.fingerprint != self.whole.fingerprint:
            fix = "give every worker the same task, task arguments and code"
            if self.source:
                fix += f"; the run's come from {self.source}, --resume never begins anew"
            lines = "; ".join(self.whole.differences(layout))
            raise refusal(Reason.MODEL_MISMATCH, f"the model of rank {rank} differs from the run's: {lines}", fix=fix)
        if self.may_change and self.whole_optimizer.new_numbers(optimizer) is not None:
            self.check_optimizer(optimizer)
        elif differences := self.whole_optimizer.differences(optimizer):
            fix = "the first worker's optimizer is the run's: give every worker the same one"
            if self.may_change:
                fix = f"the run's comes from {self.source}: only its numbers may change; --resume never begins anew"
            problem = f"the optimizer of rank {rank} differs from the run's: {'; '.join(differences[:5])}"
            raise refusal(Reason.OPTIMIZER_MISMATCH, problem, fix=fix)

    def check_optimizer(self, optimizer: OptimizerSpec) -> None:
        """Refuse an optimizer that cannot run here: a class that torch has not, or that needs whole tensors,
        hyperparameters that it does not take, no parameter at all. Where workers run the optimizer it may be any."""
        mode, store, aggregation = self._config.run.mode, self._config.store, self._config.policy.aggregation
        sums = optimizer.reduction == "sum"
        if sums and not (self._may_sum and self.kind.steps_along_mean_gradient):
            why = "steps are along a weighted mean" if not self.kind.worker_steps else "workers step by themselves"
            raise refusal(
                Reason.OPTIMIZER_UNSUPPORTED,
                f"session.optimizer(..., reduction='sum') in mode {mode}, whose {why}",
                fix="use --mode sync, allreduce, async or ssp; or a loss that is a mean over its batch",
            )
        if self.kind.worker_steps:
            if optimizer.tables:
                sent = "weights" if self._outer is None else "how far their weights went"
                problem = f"tables of rows (session.rows) need gradients, and workers of mode {mode} send {sent}"
                raise refusal(Reason.BAD_REQUEST, problem, fix="use --mode sync, async or ssp")
            return
        _check_known(optimizer)
        if optimizer.tables and (store.max_norm or store.polyak or aggregation != "mean"):
            raise refusal(
                Reason.BAD_REQUEST,
                "a run with tables of rows (session.rows) aggregates by mean, without store.max_norm and store.polyak, "
                "which would see the rest of the gradient only",
                fix="start ps-server without these; in sync store.clip_norm counts rows",
            )
        if sums and aggregation != "mean":
            problem = (
                f"session.optimizer(..., reduction='sum') with policy.aggregation {aggregation}, which makes no sum"
            )
            fix = "leave policy.aggregation out; or a loss that is a mean over its batch"
            raise refusal(Reason.OPTIMIZER_UNSUPPORTED, problem, fix=fix)
        for table in optimizer.tables:
            check_table(table)
        if not any(group.tensors for group in optimizer.groups):
            raise refusal(Reason.BAD_REQUEST, "there is nothing to train: the optimizer holds no parameter")

    def share_of(self, whole: Layout) -> Share:
        """This server's share of a model, the run's or another. LIMIT_EXCEEDED for one too small for its shards."""
        if self.share is not None and self.whole is not None and whole.fingerprint == self.whole.fingerprint:
            return self.share
        server = self._config.server
        return divide(whole, server.shards)[server.shard]

    def _check_size(self, share: Share, optimizer: OptimizerSpec) -> None:
        limit = self._config.limits.model_bytes
        num_bytes = share.layout.total_bytes + sum(table.num_bytes for table in share.optimizer(optimizer).tables)
        if num_bytes > limit:
            problem = f"a model of {num_bytes:,} bytes; this server takes {limit:,} (limits.model_bytes)"
            fix = "start ps-server with --set limits.model_bytes=... if that is really the model"
            raise refusal(Reason.LIMIT_EXCEEDED, problem, fix=fix)

    def adopt(self, whole: Layout, optimizer: OptimizerSpec) -> None:
        """Make this the run's model. Refuses LIMIT_EXCEEDED a model too large, or too small for so many shards."""
        server, share = self._config.server, self.share_of(whole)
        self._check_size(share, optimizer)
        self.whole, self.whole_optimizer = whole, optimizer
        self.share, self.optimizer = share, share.optimizer(optimizer)
        fields = {"shard": server.shard, "here": share.layout.num_parameters} if server.shards > 1 else {}
        log.info("model", tensors=len(whole.specs), parameters=whole.num_parameters, optimizer=optimizer.name, **fields)
        if server.shard == 0:
            self._name_buffers(whole)
        if optimizer.tables and server.shard == 0:
            rows = ", ".join(f"{table.name} {table.num_rows:,} x {table.dim}" for table in optimizer.tables)
            log.info("tables", rows=rows)
            if self._config.checkpoint.dir is None and self._config.output.save is None:
                meaning = "tables of rows are gone when the run has ended: --save writes them, --checkpoint-dir too"
                log.warning("tables_not_kept", meaning=meaning)

    def _name_buffers(self, whole: Layout) -> None:
        """Log the buffers that are not averaged: statistics in a layer of a user's own may have to be."""
        names = [spec.name for spec in whole.specs if not spec.averaged]
        if names and self._config.store.buffers == "average":  # otherwise all of them are alike
            rest = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
            log.info("buffers_not_averaged", buffers=", ".join(names[:_NUM_NAMED]) + rest, meaning=_NOT_AVERAGED)

    def change(self, optimizer: OptimizerSpec) -> None:
        """Adopt the optimizer of the first worker of a run that goes on."""
        assert self.whole_optimizer is not None and self.share is not None
        for name, then, now in self.whole_optimizer.new_numbers(optimizer) or ():
            if self._config.server.shard == 0:  # the others would log the same
                log.warning("resumed_with_another", what=name, now=now, snapshot=then)
        self.whole_optimizer, self.optimizer = optimizer, self.share.optimizer(optimizer)
        if self.store.tables is not None:
            self.store.tables.change(self.optimizer.tables)
        self.may_change = False

    def check_hyperparameters(self, groups: Sequence[Hyperparameters]) -> None:
        """Refuse hyperparameters that the optimizer here would fail on, or would not have begun with."""
        assert self.optimizer is not None
        for name, known, group in zip(self.optimizer.classes, self.optimizer.groups, groups, strict=False):
            if group and not self.kind.worker_steps:
                check_hyperparameters(name, group, known.hyperparameters)
        for table, group in zip(self.optimizer.tables, groups[len(self.optimizer.groups) :], strict=False):
            if group and not (group.keys() == {"lr"} and isinstance(group["lr"], float) and 0 <= group["lr"] <= 1e9):
                raise refusal(Reason.BAD_REQUEST, f"table '{table.name}': {str(group)[:80]} is no learning rate")

    def names_here(self, positions: Sequence[int]) -> frozenset[str]:
        """The names of the parts on this server of these tensors, which are positions in the workers' specs. Refuses
        BAD_REQUEST an unknown position."""
        if not positions:
            return frozenset()
        assert self.whole is not None and self.share is not None
        if max(positions) >= len(self.whole.specs):
            problem = (
                f"tensor {max(positions)} is said to have no gradient; this model has {len(self.whole.specs)} tensors"
            )
            raise refusal(Reason.BAD_REQUEST, problem)
        names = {self.whole.specs[position].name for position in positions}
        return frozenset(part.name for part in self.share.parts if part.spec.name in names)

    def positions_of(self, names: frozenset[str]) -> list[int]:
        """The positions in the workers' specs of these parts on this server."""
        assert self.whole is not None and self.share is not None
        wanted = {part.spec.name for part in self.share.parts if part.name in names}
        return [position for position, spec in enumerate(self.whole.specs) if spec.name in wanted]

    def forget(self) -> None:
        """Forget the model: its worker is gone before there were weights."""
        self.whole = self.whole_optimizer = self.share = self.optimizer = None

    def prepare_tables(self, seed: int | None) -> None:
        """Make the tables of rows, which takes seconds for many rows. Without a seed their values are undefined."""
        specs = self.optimizer.tables if self.optimizer is not None else ()
        if specs and (self._tables is None or self._tables.specs != specs):
            self._tables = Tables(specs, seed)

    # ---- weights ----------------------------------------------------------------------------

    def new_memory(self) -> Segment:
        """Memory for one version of the weights, shared where workers of this host may read it."""
        assert self.layout is not None
        num_bytes, frozen = self.layout.total_bytes, slice(self.layout.exchange_bytes, None)
        memory = None
        if self._config.server.shared_memory and self.layout.exchange_bytes > INLINE_BYTES:
            try:
                memory = new_segment(num_bytes)
            except SegmentError as error:
                log.warning("not_shared", reason=str(error))
        memory = memory or private_segment(num_bytes)
        if self.has_weights:
            memory.payload[frozen].copy_(self.store.weights[frozen])
        return memory

    def check_finite(self, rank: int, weights: Segment) -> None:
        """Refuse initial weights with NaN or Inf, in buffers too: they could not be averaged."""
        assert self.layout is not None
        for spec, tensor in self.layout.views(weights.payload):
            is_float = spec.kind is not Kind.FROZEN and tensor.is_floating_point()
            if is_float and not bool(torch.isfinite(tensor).all()):
                raise refusal(
                    Reason.BAD_REQUEST,
                    f"the initial weights of rank {rank} hold NaN or Inf in '{spec.name}'",
                    fix="look at how it is initialised; a mask with -inf can be a buffer with persistent=False",
                )

    def begin(self, weights: Segment, restore: Callable[[Store], None] = lambda _: None) -> None:
        """Begin with these initial weights, uint8 [total_bytes], or with the whole state that `restore` sets."""
        assert self.layout is not None
        store, server, policy = self._config.store, self._config.server, self._config.policy
        self.prepare_tables(None)
        self.store = Store(
            self.layout,
            weights.payload,
            self.running,
            StoreOptions(
                buffers=store.buffers,
                polyak=store.polyak,
                aggregation=AGGREGATIONS.load(policy.aggregation),
                trim=policy.trim,
                clip_norm=store.clip_norm,
                limits=Limits(store.on_nonfinite, store.max_norm, store.on_large),
                is_part=server.shards > 1,
                measures_direction=self._outer is not None,
                steps=not self.kind.has_peers,
            ),
            self._tables,
        )
        restore(self.store)
        num_bytes = self.layout.exchange_bytes
        self._tensors.size_for(num_bytes)
        self.staging = StagingPool(server.max_staged, num_bytes)
        notify, version = self._tensors.notify, self.store.version
        self.publisher = Publisher(weights, num_bytes, server.max_replies, self.new_memory, notify, version)
        self.changes = Changes(self.layout, version)
        self.references = References(self.store, self._tensors, self._has_rounds, self._has_fragments)
        if self._compensation is not None:
            num_kept = 2 if policy.delayed_update else 1
            self.delivered = Delivered(self._compensation, self.store.windows, FlatRun.view, num_kept)
        self.has_weights = True

    def small_payload(self) -> bytes:
        """The newest weights, of a model so small that all tensor work runs inline."""
        version, payload = self._small_payload
        if version != self.store.version:
            payload = bytes(self.publisher.latest.segment.bytes[: self.store.layout.exchange_bytes])
            self._small_payload = self.store.version, payload
        return payload

    def frozen_bytes(self) -> memoryview:
        """The part of a payload of weights that never changes."""
        return as_bytes(self.store.weights)[self.store.layout.exchange_bytes :]

    def copy(self, averaged: bool) -> tuple[int, torch.Tensor]:
        """Version and a copy of the weights, uint8 [total_bytes], or of their Polyak average. On the tensor thread."""
        return self.store.version, self.store.payload(averaged).clone()


def _check_known(optimizer: OptimizerSpec) -> None:
    """Refuse classes that torch has not, or that need whole tensors, and hyperparameters that they do not take."""
    for name, group in zip(optimizer.classes, optimizer.groups, strict=True):
        find_optimizer(name)
        check_hyperparameters(name, group.hyperparameters)


def check_table(table: TableSpec) -> None:
    """Refuse a table of rows that cannot be."""
    whole = (table.name, table.num_rows, table.dim, table.dtype, table.init_std)
    make_spec(*whole, table.optimizer, table.hyperparameters)


def outer_spec(name: str, arguments: Mapping[str, Any], layout: Layout) -> OptimizerSpec:
    """One group of all that is trained."""
    trained = tuple(entry.spec.name for entry in layout.entries if entry.spec.kind is Kind.PARAMETER)
    return OptimizerSpec(name, (GroupSpec(trained, dict(arguments)),))


def names_of(layout: Layout, optimizer: OptimizerSpec) -> tuple[str, str]:
    """Names of a model and of its optimizer, the same for the same; hexadecimal."""
    spec: list[Any] = [
        optimizer.name,
        [[list(group.tensors), dict(group.hyperparameters)] for group in optimizer.groups],
    ]
    if optimizer.tables:
        spec.append([vars(table) for table in optimizer.tables])
    if optimizer.reduction != "mean":
        spec.append(optimizer.reduction)
    text = json.dumps(spec, sort_keys=True, default=str)
    return layout.fingerprint, hashlib.sha256(text.encode()).hexdigest()
