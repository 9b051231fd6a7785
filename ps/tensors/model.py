"""A run's model: the layout and the optimizer that all workers agree on, the store, and memory for versions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...common.combinations import choices_of
from ...common.combinations import refusal as refused
from ...common.config.schema import Config
from ...common.errors import ParamServerError, Reason, refusal
from ...common.registry import AGGREGATIONS
from ...common.reporting.log import get_logger
from ...common.tensors.judgement import unsound_start
from ...common.tensors.layout import Kind, Layout
from ...common.tensors.optimizers import GroupSpec, OptimizerSpec, TableSpec
from ...common.tensors.sharding import Share, divide
from ...common.tensors.tables import make_spec
from ...common.wire.frames import INLINE_BYTES
from ...common.wire.segments import Segment, SegmentError, new_segment, private_segment
from ..policies.base import Policy
from .master import first_narrow
from .replies import Changes, Publication, Publisher, References
from .staging import StagingPool
from .store import Store, StoreOptions, Tables
from .thread import TensorThread

log = get_logger()

_NUM_NAMED = 8
_NOT_AVERAGED = (
    "they follow the lowest live rank; to average running statistics of your own layers, name them in "
    "session.optimizer(..., averaged_buffers=[...]) or in a task's averaged_buffers"
)

_MASTER = "the server averages and steps them in float32, in more memory; store.master_weights=false turns it off"
_SHORT = (
    "a step below half of their precision changes nothing, as in torch; to keep such steps, train a model in float32 "
    "with --precision bf16, or let workers take local steps (--mode diloco, with store.master_weights)"
)


class Model:
    """The run's model.

    - Once `has_model`: `whole` and `whole_optimizer` of the workers, and the parts of this shard, which with one shard
      are all of it: `share`, `layout` and `optimizer`.
    - Once `has_weights`: `store`, `staging`, `publisher`, `changes` and `references`. Weights that fit in one message
      are not `is_published`: a reply has a copy of the newest ones.

    The mode's `policy` decides which optimizer runs here:
    - Workers send gradients: the workers' optimizer.
    - Workers send deltas: `policy.outer`.
    - Workers step themselves: none, but they may send their optimizer's state.
    """

    whole: Layout
    whole_optimizer: OptimizerSpec
    share: Share
    layout: Layout  # of this shard's payloads
    optimizer: OptimizerSpec
    store: Store
    staging: StagingPool
    publisher: Publisher
    changes: Changes
    references: References
    is_published: bool

    def __init__(self, config: Config, tensors: TensorThread, policy: Policy) -> None:
        self._config, self._tensors = config, tensors
        self.kind, self.is_part = policy.kind, config.server.shards > 1  # other shards have the rest of the model
        self._policy, self._outer = policy, policy.outer
        self.has_model = self.has_weights = False
        self.source = ""  # the snapshot or the server above that the model comes from
        self.may_change = False  # the first worker after a resume may change the optimizer's numbers
        self._tables: Tables | None = None
        self._small_payload: tuple[int, bytes] = (-1, b"")  # version and payload

    @property
    def outer(self) -> OptimizerSpec | None:
        """The server's outer optimizer over the share, or None if the mode has none."""
        return outer_spec(self._outer.name, self._outer.arguments, self.layout) if self._outer else None

    @property
    def running(self) -> OptimizerSpec | None:
        """The optimizer that runs here, or whose state the server keeps for the workers."""
        if (outer := self.outer) is not None:
            return outer
        optimizer = self.optimizer
        if not self.kind.worker_steps:
            return optimizer
        # The server can keep the workers' state only for a class of torch that is elementwise.
        if not self.kind.steps_along_mean_gradient or optimizer.tables:
            return None
        try:
            optimizer.check_known()
        except ParamServerError:
            return None
        return optimizer

    # ---- what all workers agree on --------------------------------------------------------

    def check(self, rank: int, layout: Layout, optimizer: OptimizerSpec) -> None:
        """Refuse a model or optimizer that differs from the run's. Before the first, refuse an impossible one."""
        if not self.has_model:
            self.check_optimizer(optimizer)
            self._check_size(self.share_of(layout), optimizer)
            # An average of 16-bit weights would stop moving, as its steps are below their precision.
            narrow = first_narrow(layout)
            if self._config.store.polyak is not None and narrow is not None and not self._has_master():
                problem = f"store.polyak with '{narrow.name}' in {narrow.dtype}, in which an average stops moving"
                fix = "leave store.polyak out; or a model in float32, with --precision bf16"
                raise refusal(Reason.OPTIMIZER_UNSUPPORTED, problem, fix=fix)
            return
        if layout.fingerprint != self.whole.fingerprint:
            fix = "give every worker the same task, task arguments and code"
            if self.source:
                fix += f"; the run's model is from {self.source}, and --resume never starts a new run"
            lines = "; ".join(self.whole.differences(layout))
            raise refusal(Reason.MODEL_MISMATCH, f"the model of rank {rank} differs from the run's: {lines}", fix=fix)
        if self.may_change and self.whole_optimizer.new_numbers(optimizer) is not None:
            self.check_optimizer(optimizer)
        elif differences := self.whole_optimizer.differences(optimizer):
            fix = "the first worker's optimizer is the run's: give every worker the same one"
            if self.may_change:
                fix = f"change only numbers of the optimizer from {self.source}, or start a new run with --resume never"
            problem = f"the optimizer of rank {rank} differs from the run's: {'; '.join(differences[:5])}"
            raise refusal(Reason.OPTIMIZER_MISMATCH, problem, fix=fix)

    def check_optimizer(self, optimizer: OptimizerSpec) -> None:
        """Refuse an optimizer that cannot run here.

        It must be an elementwise class of torch, with valid hyperparameters and at least one parameter. If the workers
        run the optimizer, any class is allowed.
        """
        mode, aggregation = self._config.run.mode, self._config.policy.aggregation
        sums = optimizer.reduction == "sum"
        if sums and not (self._policy.may_sum and self.kind.steps_along_mean_gradient):
            why = "steps use a weighted mean" if not self.kind.worker_steps else "workers step by themselves"
            problem = f"session.optimizer(..., reduction='sum') in mode {mode}, whose {why}"
            fix = "use --mode sync, allreduce, async or ssp; or a loss that is a mean over its batch"
            raise refusal(Reason.OPTIMIZER_UNSUPPORTED, problem, fix=fix)
        if error := refused(choices_of(self._config, mode, has_rows=bool(optimizer.tables))):
            raise refusal(Reason.OPTIMIZER_UNSUPPORTED, error.message, fix=error.fix)
        if self.kind.worker_steps:
            return
        optimizer.check_known()
        if sums and aggregation != "mean":
            problem = f"session.optimizer(..., reduction='sum') with policy.aggregation {aggregation}, which cannot sum"
            fix = "leave policy.aggregation out; or a loss that is a mean over its batch"
            raise refusal(Reason.OPTIMIZER_UNSUPPORTED, problem, fix=fix)
        for table in optimizer.tables:
            check_table(table)
        if not any(group.tensors for group in optimizer.groups):
            raise refusal(Reason.OPTIMIZER_UNSUPPORTED, "there is nothing to train: the optimizer has no parameter")

    def _has_master(self) -> bool:
        """Whether 16-bit weights are stepped in float32: workers take local steps, and send what is averaged."""
        return self._config.store.master_weights and not self.kind.steps_along_mean_gradient

    def share_of(self, whole: Layout) -> Share:
        """Return this shard's share of a model. Raises a LIMIT_EXCEEDED refusal if it has too few rows to divide."""
        if self.has_model and whole.fingerprint == self.whole.fingerprint:
            return self.share
        server = self._config.server
        return divide(whole, server.shards)[server.shard]

    def _check_size(self, share: Share, optimizer: OptimizerSpec) -> None:
        limit = self._config.limits.model_bytes
        num_bytes = share.layout.total_bytes + sum(table.num_bytes for table in share.optimizer(optimizer).tables)
        if num_bytes > limit:
            problem = f"a model of {num_bytes:,} bytes; this server takes {limit:,} (limits.model_bytes)"
            fix = "if the model is right, start ps-server with --set limits.model_bytes=..."
            raise refusal(Reason.LIMIT_EXCEEDED, problem, fix=fix)

    def adopt(self, whole: Layout, optimizer: OptimizerSpec, source: str = "") -> None:
        """Make this the run's model, for a resumed run from `source`.

        Raises a LIMIT_EXCEEDED refusal if it is too large, or too small to divide.
        """
        self.source, self.may_change = source, bool(source)
        server, share = self._config.server, self.share_of(whole)
        self._check_size(share, optimizer)
        self.whole, self.whole_optimizer = whole, optimizer
        self.share, self.layout, self.optimizer = share, share.layout, share.optimizer(optimizer)
        self.has_model = True
        fields = {"shard": server.shard, "here": share.layout.num_parameters} if server.shards > 1 else {}
        log.info("model", tensors=len(whole.specs), parameters=whole.num_parameters, optimizer=optimizer.name, **fields)
        if server.shard == 0:
            # The user may have to name statistics of own layers.
            names = [spec.name for spec in whole.specs if not spec.averaged]
            if names and self._config.store.buffers == "average":  # otherwise no buffer is averaged
                rest = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
                log.info("buffers_not_averaged", buffers=", ".join(names[:_NUM_NAMED]) + rest, meaning=_NOT_AVERAGED)
            if (narrow := first_narrow(whole)) is not None and self._has_master():
                num_bytes = 4 * sum(run.num_elements for run in whole.runs if run.kind is Kind.PARAMETER)
                log.info("master_weights", tensor=narrow.name, dtype=narrow.dtype, bytes=num_bytes, meaning=_MASTER)
            elif narrow is not None:
                log.warning("short_weights", tensor=narrow.name, dtype=narrow.dtype, meaning=_SHORT)
        if optimizer.tables and server.shard == 0:
            rows = ", ".join(f"{table.name} {table.num_rows:,} x {table.dim}" for table in optimizer.tables)
            log.info("tables", rows=rows)
            if self._config.checkpoint.dir is None and self._config.output.save is None:
                meaning = "tables of rows are lost at the end of the run; --save or --checkpoint-dir writes them"
                log.warning("tables_not_kept", meaning=meaning)

    def change(self, optimizer: OptimizerSpec) -> None:
        """Adopt the optimizer of the first worker after a resume."""
        for name, then, now in self.whole_optimizer.new_numbers(optimizer) or ():
            if self._config.server.shard == 0:  # the other shards would log the same
                log.warning("resumed_with_another", what=name, now=now, snapshot=then)
        self.whole_optimizer, self.optimizer = optimizer, self.share.optimizer(optimizer)
        if self.store.tables is not None:
            self.store.tables.change(self.optimizer.tables)
        self.may_change = False

    def names_here(self, positions: Sequence[int]) -> frozenset[str]:
        """Return the names of this shard's parts of the tensors at `positions` in the workers' specs.

        Raises a BAD_REQUEST refusal for an unknown position.
        """
        if max(positions) >= len(self.whole.specs):
            problem = f"tensor {max(positions)} in without_gradient; this model has {len(self.whole.specs)} tensors"
            raise refusal(Reason.BAD_REQUEST, problem)
        names = {self.whole.specs[position].name for position in positions}
        return frozenset(part.name for part in self.share.parts if part.spec.name in names)

    def positions_of(self, names: frozenset[str]) -> list[int]:
        """Return the positions in the workers' specs of these parts of this shard."""
        wanted = {part.spec.name for part in self.share.parts if part.name in names}
        return [position for position, spec in enumerate(self.whole.specs) if spec.name in wanted]

    def forget(self) -> None:
        """Drop the model, because its worker left before it uploaded weights."""
        self.has_model = False

    def prepare_tables(self, seed: int | None) -> None:
        """Make the tables of rows, which takes seconds for many rows. Without a seed they are uninitialized."""
        specs = self.optimizer.tables
        if specs and (self._tables is None or self._tables.specs != specs):
            self._tables = Tables(specs, seed)

    # ---- weights ----------------------------------------------------------------------------

    @property
    def is_large(self) -> bool:
        """Whether its weights are sent in several messages. Then they may be newer than the reply before them."""
        return self.has_model and self.layout.exchange_bytes > INLINE_BYTES

    def new_memory(self) -> Segment:
        """Return memory for one version of the weights. It is shared memory if workers of this host may read it."""
        num_bytes, frozen = self.layout.total_bytes, slice(self.layout.exchange_bytes, None)
        memory = None
        if self._config.server.shared_memory and self.is_large:
            try:
                memory = new_segment(num_bytes)
            except SegmentError as error:
                log.warning("not_shared", reason=str(error))
        memory = memory or private_segment(num_bytes)
        if self.has_weights:
            memory.payload[frozen].copy_(self.store.weights[frozen])
        return memory

    def check_finite(self, rank: int, weights: Segment) -> None:
        """Refuse initial weights with NaN or Inf. Buffers must be finite too, because they are averaged."""
        for spec, tensor in self.layout.views(weights.payload):
            is_float = spec.kind is not Kind.FROZEN and tensor.is_floating_point()
            if is_float and not bool(torch.isfinite(tensor).all()):
                raise unsound_start(rank, spec.name)

    def begin(self, weights: Segment, restore: Callable[[Store], None] = lambda _: None) -> None:
        """Begin with the initial weights, uint8 [total_bytes], or with the state that `restore` sets."""
        server, policy = self._config.server, self._config.policy
        self.prepare_tables(None)
        options = StoreOptions(
            **dict(self._config.store),
            aggregation=AGGREGATIONS.load(policy.aggregation),
            trim=policy.trim,
            is_part=self.is_part,
            measures_direction=self._outer is not None,
            steps=self.kind.has_payload,
            has_master=self._has_master(),
        )
        self.store = Store(self.layout, weights.payload, self.running, options, self._tables)
        restore(self.store)
        num_bytes = self.layout.exchange_bytes
        self._tensors.size_for(num_bytes)
        self.staging, self.is_published = StagingPool(server.max_staged, num_bytes), num_bytes > INLINE_BYTES
        first = Publication(self.store.version, weights, num_bytes, self._tensors.notify)
        self.publisher = Publisher(first, server.max_replies, self.new_memory)
        self.changes = Changes(self.layout, self.store.version)
        self.references = References(
            self.store, self._tensors, self._policy.has_rounds, self._policy.fragments > 1, self.is_part
        )
        self.has_weights = True

    def replace(self, weights: torch.Tensor, version: int) -> None:
        """Publish these weights, uint8 [total_bytes], as those of the newest version, which were not here."""
        publication = self.publisher.next(version)
        self._small_payload = -1, b""
        self._tensors.submit(partial(self.store.replace, weights, publication.segment.payload))
        self._tensors.then(partial(publication.made, self.store.layout.exchange_bytes))

    def small_payload(self) -> bytes:
        """Return the newest weights of a small model, for which all tensor work runs inline."""
        version, payload = self._small_payload
        if version != self.store.version:
            payload = bytes(self.publisher.latest.segment.bytes[: self.store.layout.exchange_bytes])
            self._small_payload = self.store.version, payload
        return payload

    def copy(self, averaged: bool) -> tuple[int, torch.Tensor]:
        """Return the version, and a copy of the weights or of their Polyak average, uint8 [total_bytes].

        It runs on the tensor thread.
        """
        return self.store.version, self.store.payload(averaged).clone()


def check_table(table: TableSpec) -> None:
    """Refuse a table of rows with impossible sizes or an unsuitable optimizer."""
    whole = (table.name, table.num_rows, table.dim, table.dtype, table.init_std)
    make_spec(*whole, table.optimizer, table.hyperparameters)


def outer_spec(name: str, arguments: Mapping[str, Any], layout: Layout) -> OptimizerSpec:
    """Return the spec of an optimizer with all trained tensors in one group."""
    trained = tuple(entry.spec.name for entry in layout.entries if entry.spec.kind is Kind.PARAMETER)
    return OptimizerSpec(name, (GroupSpec(trained, dict(arguments)),))


def names_of(layout: Layout, optimizer: OptimizerSpec) -> tuple[str, str]:
    """Return hexadecimal hashes of a model and of its optimizer, by which equal models are recognised."""
    text = json.dumps(vars(optimizer), sort_keys=True, default=vars)
    return layout.fingerprint, hashlib.sha256(text.encode()).hexdigest()
