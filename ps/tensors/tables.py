"""The tables of rows that lie here: gradients of rows come in, are held until their contribution is folded, and the
mean of a round's moves them.

A contribution without a gradient for a row counts as one of zeros, as in a mean over the union batch. Those of a round
are kept until its commit: memory for the rows that its workers used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from ...common.errors import Reason, refusal
from ...common.tensors.layout import DTYPES
from ...common.tensors.optimizers import Hyperparameters, TableSpec
from ...common.tensors.tables import Table, summed

_ID_BYTES = 8


class Rows(NamedTuple):
    """Gradients of rows of one table: ids int64 [n], distinct and ascending, and values [n, dim]."""

    table: int
    ids: torch.Tensor
    values: torch.Tensor


class Tables:
    """In the order of `specs`. Without a seed they hold anything until `set_state`."""

    sums = False  # gradients of a round are added up

    def __init__(self, specs: Sequence[TableSpec], seed: int | None) -> None:
        self.specs = tuple(specs)
        self._tables = [Table(spec, seed) for spec in specs]
        self._round: list[tuple[Sequence[Rows], float]] = []
        self._mean: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None  # of the round, once it is measured

    # ---- what comes from workers, and goes to them ---------------------------------------------------

    def read(self, table: int, count: int, data: memoryview, before: Sequence[Rows]) -> Rows:
        """A message of gradients, after those `before` it in one contribution. Refuses BAD_REQUEST what is no part of
        a contribution; NaN and Inf are judged with the whole."""
        spec = self._spec(table)
        dtype = DTYPES[spec.dtype]
        if not count or len(data) != count * (_ID_BYTES + spec.dim * dtype.itemsize):
            raise refusal(Reason.BAD_REQUEST, f"{len(data)} bytes for {count} rows of table '{spec.name}'")
        held = bytearray(data)
        ids = torch.frombuffer(held, dtype=torch.int64, count=count)
        values = torch.frombuffer(held, dtype=dtype, offset=count * _ID_BYTES).view(count, spec.dim)
        last = next((int(rows.ids[-1]) for rows in reversed(before) if rows.table == table), -1)
        if int(ids[0]) <= last or bool((ids[1:] <= ids[:-1]).any()):
            raise refusal(Reason.BAD_REQUEST, f"rows of table '{spec.name}' that are not ascending")
        _check_range(spec, ids)
        return Rows(table, ids, values)

    def pull(self, table: int, data: bytes, max_bytes: int) -> bytes:
        """Rows as they are now, of the ids in `data`. Refuses BAD_REQUEST what is not here, or too many."""
        spec = self._spec(table)
        if not data or len(data) % _ID_BYTES:
            raise refusal(Reason.BAD_REQUEST, f"{len(data)} bytes are no list of ids")
        ids = torch.frombuffer(bytearray(data), dtype=torch.int64)
        num_bytes = len(ids) * spec.dim * DTYPES[spec.dtype].itemsize
        if num_bytes > max_bytes:
            raise refusal(
                Reason.BAD_REQUEST, f"{len(ids)} rows of table '{spec.name}' have more than {max_bytes} bytes"
            )
        _check_range(spec, ids)
        return self._tables[table].rows(ids).numpy().tobytes()

    def _spec(self, table: int) -> TableSpec:
        if table >= len(self.specs):
            raise refusal(Reason.BAD_REQUEST, f"table {table} is asked for; this run has {len(self.specs)}")
        return self.specs[table]

    # ---- what moves them -------------------------------------------------------------------------

    def fold(self, rows: Sequence[Rows], weight: float) -> None:
        """Add a contribution to the round's."""
        self._round.append((rows, weight))

    def measure(self) -> float:
        """2-norm of the mean of what was folded, which the next commit steps along."""
        if self._mean is None:
            self._mean = self._mean_of_round()
        norms = (torch.linalg.vector_norm(values, dtype=torch.float64) for _, values in self._mean.values())
        return math.hypot(*(norm.item() for norm in norms))

    def commit(self, lr_scale: float = 1.0, factor: float = 1.0) -> str:
        """Step each table that has a gradient along the mean of what was folded, times `factor`. Returns where that
        has left NaN or Inf, as a phrase; empty: nowhere."""
        mean = self._mean if self._mean is not None else self._mean_of_round()
        self._round, self._mean = [], None
        for number, (ids, values) in mean.items():
            table = self._tables[number]
            table.step(ids, values if factor == 1.0 else values * factor, lr_scale)
            if not math.isfinite(table.rows(ids).sum().item()):
                wrong = ids[~torch.isfinite(table.rows(ids)).all(1)].tolist()
                if wrong:
                    return f"NaN or Inf in row {wrong[0]:,} of table '{table.spec.name}'"
        return ""

    def _mean_of_round(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """By table, of those that have a gradient: ids and values."""
        total, found = sum(weight for _, weight in self._round), {}
        for number in range(len(self._tables)):
            parts = [
                (row.ids, row.values, 1.0 if self.sums else weight / total)
                for rows, weight in self._round
                for row in rows
                if row.table == number
            ]
            if parts:
                found[number] = summed(parts)
        return found

    def set_hyperparameters(self, told: Sequence[Hyperparameters]) -> None:
        """The learning rate of each, where it is told."""
        for table, values in zip(self._tables, told, strict=False):
            table.set_lr(values.get("lr"))

    def change(self, specs: Sequence[TableSpec]) -> None:
        """The same tables, with other hyperparameters."""
        self.specs = tuple(specs)
        for table, spec in zip(self._tables, specs, strict=True):
            table.change(spec)

    # ---- what is kept -----------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        return sum(table.num_bytes for table in self._tables)

    def state(self, into: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """A copy of all tables by `<key>/<table>`, in the memory of an earlier copy where one is given."""
        found = {}
        for name, value in self._items():
            old = (into or {}).get(name)
            found[name] = value.clone() if old is None else old.copy_(value)
        return found

    def _items(self) -> Iterable[tuple[str, torch.Tensor]]:
        for table in self._tables:
            for key, value in table.state().items():
                yield f"{key}/{table.spec.name}", value

    def set_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a copy of it. ValueError for that of other tables."""
        for table in self._tables:
            split = [(full.partition("/"), value) for full, value in state.items()]
            table.set_state({key: value for (key, _, name), value in split if name == table.spec.name})


def _check_range(spec: TableSpec, ids: torch.Tensor) -> None:
    least, most = (int(item) for item in ids.aminmax())
    if least < spec.first or most >= spec.end:
        wrong = least if least < spec.first else most
        raise refusal(
            Reason.BAD_REQUEST, f"row {wrong} of table '{spec.name}', which has {spec.first} to {spec.end - 1}"
        )
