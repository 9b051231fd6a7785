"""This shard's tables of rows. Gradients of rows come with contributions, and a commit steps the tables.

A contribution without a gradient for a row counts as a zero gradient, as in a mean over the union batch. The gradients
of a round are kept until its commit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ...common.errors import Reason, refusal
from ...common.tensors.layout import DTYPES
from ...common.tensors.optimizers import Hyperparameters, TableSpec
from ...common.tensors.tables import Table, summed
from .sanity import Unsound

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
        is_elsewhere = not count and all(rows.table != table for rows in before)  # another shard has the table's rows
        if not (count or is_elsewhere) or len(data) != count * (_ID_BYTES + spec.dim * dtype.itemsize):
            raise refusal(Reason.BAD_REQUEST, f"{len(data)} bytes for {count} rows of table '{spec.name}'")
        if is_elsewhere:
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
