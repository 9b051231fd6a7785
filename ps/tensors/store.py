"""The store: weights, the mean of a round, the optimizer, the Polyak average, and the tables of rows.

It works on flat runs (`common/tensors/layout.py`), cut into windows of 4 MiB that stay in the cache. For each window, a
commit folds the remaining payloads and steps the optimizer. The store knows neither modes nor workers' names. One
thread calls it, in this order:

    fold(payload, weight) ... fold(payload, weight); commit()

Payloads are uint8 tensors of `layout.exchange_bytes`. `aggregation/` combines those of a round. The store needs memory
for the weights, the optimizer state, one Polyak average and one mean. Some aggregations keep every payload of the
round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from ...common.config.sections.training import StoreConfig
from ...common.errors import Reason, refusal
from ...common.tensors.judgement import factor_to
from ...common.tensors.layout import DTYPES, FlatRun, Kind, Layout, View
from ...common.tensors.optimizers import Hyperparameters, OptimizerSpec, TableSpec
from ...common.tensors.tables import Table, summed
from .aggregation.base import Aggregator
from .aggregation.direction import Direction
from .aggregation.mean import Mean
from .flat_optimizer import FlatOptimizer, OptimizerState, Window, windows_of
from .master import Master, first_narrow
from .sanity import Sanity, Unsound
from .thread import INLINE_BYTES


class Step(NamedTuple):
    """Settings of one commit.

    - `num_live`: live workers. Running statistics move by the folded share of these workers.
    - `lowest_live`: the lowest live rank. Buffers that are not averaged are copied from its contribution, or from one
      of a lower rank that has left since. Without such a contribution they stay unchanged.
    - `hyperparameters`: for each group and table, the values under which the contribution was computed.
    - `lr_scale`: multiplies the learning rate of this step.
    - `momentum_among`: the number of workers whose gradients step one by one (`momentum_left`).
    - `clip_norm`: limit on the norm of this step, besides the store's own limit. 0: no limit.
    """

    num_live: int
    lowest_live: int
    hyperparameters: Sequence[Hyperparameters] | None = None
    lr_scale: float = 1.0
    momentum_among: int = 1
    clip_norm: float = 0.0


class StoreOptions(StoreConfig):
    """Settings of a store: the section `store` of the configuration, and those that follow from other settings.

    - `trim`: policy.trim, for the aggregations that read it.
    - `is_part`: other shards have the rest of the model.
    - `measures_direction`: compare each round's mean with the previous one.
    - `steps`: False if the optimizer only keeps the state that the workers send (`Store.bring`).
    - `has_master`: workers take local steps, so 16-bit weights are stepped in float32 (`master.py`).
    """

    aggregation: type[Aggregator] = Mean
    trim: int = 1
    is_part: bool = False
    measures_direction: bool = False
    steps: bool = True
    has_master: bool = False


class Store:
    """Versioned weights, uint8 [layout.total_bytes], with the aggregation and optimizer that change them.

    `optimizer` is None if workers contribute weights. The mean then becomes the new weights. `version` counts commits.
    `sanity` judges contributions before they are folded. With a `master`, the aggregation, the optimizer and the Polyak
    average work in its layout, `step_layout`, and `weights` are the rounded ones.
    """

    def __init__(
        self,
        layout: Layout,
        weights: torch.Tensor,
        optimizer: OptimizerSpec | None,
        options: StoreOptions = StoreOptions(),
        tables: Tables | None = None,
    ) -> None:
        self.layout = layout
        self.weights = weights
        self.version = 0
        self._options, self.clip_norm = options, options.clip_norm
        self._steps = options.steps and optimizer is not None
        self.windows = self._windows = windows_of(layout)
        self.step_layout, stepped = layout, weights
        self.master: Master | None = None
        if options.has_master and first_narrow(layout) is not None:
            self.master = Master(layout, weights, options.buffers == "average")
            self.step_layout, stepped = self.master.layout, self.master.weights
            self._windows = windows_of(self.step_layout)
        # Making a view takes as long as adding 10,000 floats. The cache compares runs and payloads by their identity,
        # and keeps the payloads alive: they are few and reused.
        is_small = layout.exchange_bytes <= INLINE_BYTES
        self._view: View = lru_cache(256)(FlatRun.view) if is_small else FlatRun.view
        self.aggregator = options.aggregation(self._windows, self._view, options.buffers, options.trim)
        self.fewest = self.aggregator.fewest  # contributions of a round with which it is robust
        self.aggregator.sums = self._steps and optimizer is not None and optimizer.reduction == "sum"
        if tables is not None:
            tables.sums = self.aggregator.sums
        self.sanity = Sanity(options, self.windows, self._view, self._steps, options.is_part, self._name_of)
        self.tables = tables
        self.direction = Direction(self._windows, self._view) if options.measures_direction else None
        self._without: frozenset[str] = frozenset()  # parameters without a gradient in all folds since the last commit
        self.averaged = stepped.clone() if options.polyak is not None else None
        self.optimizer = None
        if optimizer is not None:
            self.optimizer = FlatOptimizer(optimizer, self.step_layout, stepped, self._windows, self._view)

    def fold(
        self,
        payload: torch.Tensor,
        weight: float,
        rank: int,
        may_keep: bool = False,
        without: frozenset[str] = frozenset(),
        rows: Sequence[Rows] = (),
        is_read_only: bool = False,
    ) -> list[torch.Tensor]:
        """Add a contribution to the round, and return the payloads that may be reused at once.

        With `may_keep`, the store may read the payload until the commit. Parameters `without` a gradient are zeros in
        it. The optimizer skips a parameter if no contribution of the round has its gradient. `rows` are gradients for
        the tables. Nothing is written to a payload that `is_read_only`.
        """
        if self.tables is not None:
            self.tables.fold(rows, weight)
        self._without = without & self._without if self.aggregator.num_folded else without
        if self.master is None:
            return self.aggregator.fold(payload, weight, rank, may_keep, is_read_only)
        taken = self.master.contribution(payload, self.weights, are_weights=not self._steps)
        self.master.free += self.aggregator.fold(taken, weight, rank, may_keep=True)
        return [payload]

    def bring(self, state: OptimizerState | None) -> None:
        """Set the state of the workers' optimizer that belongs to the weights folded next. None: it is unknown."""
        if state is None:
            self.optimizer = None
        elif self.optimizer is not None:
            self.optimizer.set_state(state)

    def replace(self, weights: torch.Tensor, target: torch.Tensor) -> None:
        """Take these weights, uint8 [total_bytes], in `target` as those of this version."""
        target.copy_(weights)
        self.weights = target
        if self.master is not None:
            self.master.widened(weights, self.master.weights)

    def change(self, rule: Callable[..., object], *weights: torch.Tensor) -> None:
        """Change the weights in place: call `rule(layout, now, *weights)`, with all weights in that layout."""
        if self.master is None:
            rule(self.layout, self.weights, *weights)
            return
        wide = [self.master.widened(item) for item in weights]
        rule(self.master.layout, self.master.weights, *wide)
        self.master.free += wide
        self.master.round(self.weights)

    def commit(
        self,
        step: Step,
        target: torch.Tensor | None = None,
        progress: Callable[[int], None] | None = None,
        norm: float | None = None,
    ) -> list[torch.Tensor]:
        """Make the next version of the folded payloads, and return the payloads that may be reused, the result's first.

        - `target`: memory for the new version, uint8 [total_bytes], if the old version is still being read.
        - `progress(n)` is called once the first n bytes are done.
        - `norm`: norm of the mean over all shards, if this store has a part of the model.

        If nothing was folded, the weights stay unchanged and the optimizer does not step. A step along zeros would
        still apply momentum and weight decay. Raises Unsound if the step leaves NaN or Inf in the weights, which then
        are not a valid version.
        """
        round_, optimizer, groups = self.aggregator, self.optimizer, step.hyperparameters or ()
        may_clip = round_.result is not None and (self.clip_norm or step.clip_norm)
        factor = self._clip_factor(norm, step.clip_norm) if may_clip else None
        if self.tables is not None:
            if optimizer is not None and groups:
                self.tables.set_hyperparameters(groups[len(optimizer.torch.param_groups) :])
            self.tables.commit(step.lr_scale, 1.0 if factor is None else factor)
        if optimizer is not None:
            optimizer.begin(self.version, groups, step.lr_scale, step.momentum_among)
        new = self.weights if target is None else target
        stepped = new if self.master is None else self.master.weights
        for index, window in enumerate(self._windows):
            if self.master is None and new is not self.weights:
                new[window.start : window.end].copy_(self.weights[window.start : window.end])
                if optimizer is not None:
                    optimizer.move(index, new)
            if (mean := round_.result) is not None:
                if factor is None:
                    round_.complete(window)
                elif factor < 1:
                    mean = round_.writable(window)
                    self.sanity.scale(mean, factor, window)
                self._move_window(index, mean, stepped, step)
            if self.master is None:
                self._check_window(new, window)
                if progress is not None:
                    progress(window.end)
        if self.master is not None:
            self.master.round(new)
            for window in self.windows:
                self._check_window(new, window)
            if progress is not None:
                progress(self.layout.exchange_bytes)
        if optimizer is not None and optimizer.unscaled:  # not after a failed step, which ends the run
            optimizer.end()
        self.weights = new
        self.version += 1
        if self.direction is not None:
            self.direction.close()
        return self._close_round()

    def _check_window(self, weights: torch.Tensor, window: Window) -> None:
        """Raise Unsound for NaN or Inf in a window that a round has changed."""
        if self.aggregator.result is not None and (wrong := self.sanity.first_unsound(weights, window)) is not None:
            raise Unsound(f"{wrong.view(weights).item()} in '{self._name_of(wrong)}'")

    def _close_round(self) -> list[torch.Tensor]:
        """End the round, and return the payloads that may be reused."""
        reusable = self.aggregator.close() if self.aggregator.result is not None else []
        if self.master is None:
            return reusable
        self.master.free += reusable
        return []

    def mean(self) -> torch.Tensor | None:
        """Complete and return the mean of the round, uint8 [exchange_bytes]; None: nothing was folded."""
        if self.aggregator.result is not None:
            for window in self._windows:
                self.aggregator.complete(window)
        return self.aggregator.result

    def receive(self, weights: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        """Make the next version of these weights, uint8 [total_bytes], in `target`, and end the round. Returns the
        payloads that may be reused."""
        self.replace(weights, target)
        self.version += 1
        return self._close_round()

    def measure(self) -> float:
        """Complete the mean of the round, and return the 2-norm of its parameters and rows on this shard."""
        mean = self.aggregator.result
        if mean is None:
            return 0.0
        norms = [self.tables.measure() if self.tables is not None else 0.0]
        for window in self._windows:
            self.aggregator.complete(window)
            norms.append(self.sanity.norm(mean, window) or 0.0)
        return math.hypot(*norms)

    def _clip_factor(self, norm: float | None, clip_norm: float) -> float:
        """Complete the mean of the round, and return the factor that clips it to its limits.

        Without limits, each window is completed when it is stepped, while it is in the cache.
        """
        bounds = [bound for bound in (self.clip_norm, clip_norm) if bound]
        return min(1.0, factor_to(min(bounds), self.measure() if norm is None else norm))

    def _move_window(self, index: int, mean: torch.Tensor, weights: torch.Tensor, step: Step) -> None:
        """Compute the weights and the Polyak average of one window from its old weights and the mean."""
        share = min(1.0, self.aggregator.num_folded / max(1, step.num_live))
        is_of_lowest = self.aggregator.lowest_rank <= step.lowest_live  # buffers that are not averaged come from it
        if self.direction is not None:
            self.direction.see(index, mean, self._without)
        if self.optimizer is not None and self._steps:
            self.optimizer.step(index, mean, self._without)
        view, buffers, polyak = self._view, self._options.buffers, self._options.polyak
        for piece in self._windows[index].pieces:
            is_buffer = piece.kind is Kind.BUFFER
            if is_buffer and buffers != "keep":
                target, source = view(piece, weights), view(piece, mean)
                if piece.is_averaged and buffers == "average":
                    target.lerp_(source, share)
                elif is_of_lowest:
                    target.copy_(source)
            elif not is_buffer and not self._steps:
                view(piece, weights).copy_(view(piece, mean))
            if self.averaged is not None and polyak is not None:
                average = view(piece, self.averaged)
                if is_buffer:
                    average.copy_(view(piece, weights))
                else:
                    average.lerp_(view(piece, weights), 1 - polyak)

    def _name_of(self, element: FlatRun) -> str:
        """Return the name of the tensor that has the first element of a run."""
        return next(entry.spec.name for entry in self.layout.entries if entry.offset <= element.offset < entry.end)

    def payload(self, averaged: bool = False) -> torch.Tensor:
        """Return the weights, or the Polyak average if there is one, uint8 [layout.total_bytes]."""
        if not averaged or self.averaged is None:
            return self.weights
        if self.master is None:
            return self.averaged
        rounded = self.weights.clone()
        self.master.round(rounded, self.averaged)
        return rounded

    def tensors(self, averaged: bool = False) -> dict[str, torch.Tensor]:
        """Return copies of the tensors by name, with aliases, as `model.load_state_dict` expects them."""
        views = self.layout.views(self.payload(averaged))
        return {name: tensor.clone() for spec, tensor in views for name in (spec.name, *spec.aliases)}

    @property
    def num_bytes(self) -> dict[str, int]:
        """Bytes by use: weights, mean, optimizer state, Polyak average, and tables of rows with their state."""
        return {
            "weights": self.weights.numel(),
            "mean": sum(payload.numel() for payload in self.aggregator.payloads),
            "optimizer": self.optimizer.num_state_bytes if self.optimizer is not None else 0,
            "averaged": self.averaged.numel() if self.averaged is not None else 0,
            **({"master": self.master.num_bytes} if self.master is not None else {}),
            **({"tables": self.tables.num_bytes} if self.tables is not None else {}),
        }


# ---- tables --------------------------------------------------------------------------------------
# This shard's tables of rows. Gradients of rows come with contributions, and a commit steps the tables.
#
# A contribution without a gradient for a row counts as a zero gradient, as in a mean over the union batch. The
# gradients of a round are kept until its commit.


_ID_BYTES = 8


class Rows(NamedTuple):
    """Gradients for rows of one table: ids int64 [n], distinct and ascending, and values [n, dim]."""

    table: int
    ids: torch.Tensor
    values: torch.Tensor


class Tables:
    """The tables of a run, in the order of `specs`. Without a seed they are uninitialized until `set_state`."""

    sums = False  # True: gradients of a round are summed, not averaged

    def __init__(self, specs: Sequence[TableSpec], seed: int | None) -> None:
        self.specs = tuple(specs)
        self._tables = [Table(spec, seed) for spec in specs]
        self._round: list[tuple[Sequence[Rows], float]] = []  # contributions with their weights
        self._mean: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None  # the round's mean, set by `measure`

    # ---- messages of workers -------------------------------------------------------------------------

    def read(self, table: int, count: int, data: memoryview, before: Sequence[Rows]) -> Rows:
        """Read a message of gradients. `before` are the contribution's earlier messages.

        Raises a BAD_REQUEST refusal for rows in a wrong order, range or size. NaN and Inf are judged later, with the
        whole contribution.
        """
        spec = self._spec(table)
        dtype = DTYPES[spec.dtype]
        is_on_another_shard = not count and all(rows.table != table for rows in before)
        if not (count or is_on_another_shard) or len(data) != count * (_ID_BYTES + spec.dim * dtype.itemsize):
            raise refusal(Reason.BAD_REQUEST, f"{len(data)} bytes for {count} rows of table '{spec.name}'")
        if is_on_another_shard:
            return Rows(table, torch.empty(0, dtype=torch.int64), torch.empty(0, spec.dim, dtype=dtype))
        memory = bytearray(data)
        ids = torch.frombuffer(memory, dtype=torch.int64, count=count)
        values = torch.frombuffer(memory, dtype=dtype, offset=count * _ID_BYTES).view(count, spec.dim)
        last = next((int(rows.ids[-1]) for rows in reversed(before) if rows.table == table and len(rows.ids)), -1)
        if int(ids[0]) <= last or bool((ids[1:] <= ids[:-1]).any()):
            raise refusal(Reason.BAD_REQUEST, f"rows of table '{spec.name}' that are not ascending")
        _check_range(spec, ids)
        return Rows(table, ids, values)

    def pull(self, table: int, data: bytes, max_bytes: int) -> bytes:
        """Return the values of the rows whose ids are in `data`.

        Raises a BAD_REQUEST refusal for unknown rows, and for more than `max_bytes`.
        """
        spec = self._spec(table)
        if not data or len(data) % _ID_BYTES:
            raise refusal(Reason.BAD_REQUEST, f"{len(data)} bytes are not a list of ids")
        ids = torch.frombuffer(bytearray(data), dtype=torch.int64)
        if len(ids) * spec.row_bytes > max_bytes:
            problem = f"{len(ids)} rows of table '{spec.name}' have more than {max_bytes} bytes"
            raise refusal(Reason.BAD_REQUEST, problem)
        _check_range(spec, ids)
        return self._tables[table].rows(ids).numpy().tobytes()

    def _spec(self, table: int) -> TableSpec:
        if table >= len(self.specs):
            raise refusal(Reason.BAD_REQUEST, f"there is no table {table}: this run has {len(self.specs)}")
        return self.specs[table]

    # ---- rounds ----------------------------------------------------------------------------------

    def fold(self, rows: Sequence[Rows], weight: float) -> None:
        """Add a contribution's rows to the round."""
        self._round.append((rows, weight))

    def measure(self) -> float:
        """Return the 2-norm of the round's mean gradient."""
        if self._mean is None:
            self._mean = self._mean_of_round()
        norms = (torch.linalg.vector_norm(values, dtype=torch.float64) for _, values in self._mean.values())
        return math.hypot(*(norm.item() for norm in norms))

    def commit(self, lr_scale: float = 1.0, factor: float = 1.0) -> None:
        """Step each table that has a gradient along the round's mean times `factor`.

        Raises Unsound, which names the first row with NaN or Inf.
        """
        mean = self._mean if self._mean is not None else self._mean_of_round()
        self._round, self._mean = [], None
        for index, (ids, values) in mean.items():
            if wrong := self._tables[index].step(ids, values if factor == 1.0 else values * factor, lr_scale):
                raise Unsound(wrong)

    def _mean_of_round(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return (ids, mean gradient) of each table that has a gradient, by the table's number."""
        total = sum(weight for _, weight in self._round)
        parts: dict[int, list[tuple[torch.Tensor, torch.Tensor, float]]] = {}
        for rows, weight in self._round:
            for row in rows:
                parts.setdefault(row.table, []).append((row.ids, row.values, 1.0 if self.sums else weight / total))
        return {table: summed(parts[table]) for table in sorted(parts)}

    def set_hyperparameters(self, groups: Sequence[Hyperparameters]) -> None:
        """Set the learning rates of the tables. A group without `lr` changes nothing."""
        for table, values in zip(self._tables, groups, strict=False):
            table.set_lr(values.get("lr"))

    def change(self, specs: Sequence[TableSpec]) -> None:
        """Set the hyperparameters of the tables. `specs` are otherwise equal to the present ones."""
        self.specs = tuple(specs)
        for table, spec in zip(self._tables, specs, strict=True):
            table.change(spec)

    # ---- snapshots --------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        return sum(table.num_bytes for table in self._tables)

    def state(self, into: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Return a copy of all tables by `<key>/<table>`, in the memory of the earlier copy `into`, if given."""
        copies = {}
        for table in self._tables:
            for key, value in table.state().items():
                name = f"{key}/{table.spec.name}"
                old = (into or {}).get(name)
                copies[name] = value.clone() if old is None else old.copy_(value)
        return copies

    def set_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a copy of the state. Raises ValueError for the state of other tables."""
        split = [(full.partition("/"), value) for full, value in state.items()]
        for table in self._tables:
            table.set_state({key: value for (key, _, name), value in split if name == table.spec.name})


def _check_range(spec: TableSpec, ids: torch.Tensor) -> None:
    least, most = (int(item) for item in ids.aminmax())
    if least < spec.first or most >= spec.end:
        wrong = least if least < spec.first else most
        problem = f"row {wrong} of table '{spec.name}', which has {spec.first} to {spec.end - 1}"
        raise refusal(Reason.BAD_REQUEST, problem)
