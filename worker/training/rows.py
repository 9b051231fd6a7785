"""A table of rows on the server: a training loop looks rows up, and backward collects their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from ...common.errors import UsageError
from ...common.tensors.optimizers import TableSpec
from ...common.tensors.tables import summed

# Fetches rows of distinct ids, int64 [n] ascending: [n, dim].
Pull = Callable[[torch.Tensor], torch.Tensor]
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Rows:
    """The table that `session.rows()` returns. `num_received` and `num_sent` count bytes, including the ids."""

    def __init__(self, spec: TableSpec, pull: Pull) -> None:
        self.spec = spec
        self._pull = pull
        self._lr: float | None = spec.hyperparameters.get("lr")
        self._is_set = False  # the script has set the learning rate
        self._leader: torch.optim.Optimizer | None = None
        # ids and rows that backward has reached since the last step, by id() of the rows
        self.used: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.num_received = self.num_sent = 0

    @property
    def lr(self) -> float | None:
        """Learning rate of the next contribution; None: the default of the table's optimizer.

        It is the rate given to `session.rows()`, scaled as a scheduler has scaled the rate of the model's first group.
        A rate that the script sets stays as it is.
        """
        group = self._leader.param_groups[0] if self._leader is not None else {}
        # set by a scheduler; OneCycleLR starts far below its rate
        begun = group.get("max_lr") or group.get("initial_lr")
        return self._lr * float(group["lr"]) / float(begun) if self._lr is not None and begun else self._lr

    @lr.setter
    def lr(self, value: float | None) -> None:
        self._lr, self._leader, self._is_set = value, None, True

    def follow(self, leader: torch.optim.Optimizer) -> None:
        """Let the schedules of the model's optimizer scale this table's rate, unless the script has set the rate."""
        if not self._is_set:
            self._leader = leader

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up the rows of `ids`: [*ids.shape, dim], on the device of `ids`.

        The rows have a gradient if gradients are enabled.

        `ids` may have any shape. Each row travels once per call. Raises UsageError for ids outside of the table.
        """
        spec = self.spec
        if ids.dtype not in _INTEGERS:
            message = f"table '{spec.name}' was given ids of {ids.dtype}"
            raise UsageError(message, fix="give ids of an integer type, such as int64")
        if torch.is_autocast_enabled(ids.device.type) and torch.get_autocast_dtype(ids.device.type) == torch.float16:
            raise _scaled(spec.name)
        distinct, where = ids.reshape(-1).cpu().long().unique(return_inverse=True)
        if len(distinct) and not (int(distinct[0]) >= 0 and int(distinct[-1]) < spec.num_rows):
            wrong = int(distinct[0] if int(distinct[0]) < 0 else distinct[-1])
            raise UsageError(f"row {wrong} of table '{spec.name}' does not exist: it has rows 0 to {spec.num_rows - 1}")
        rows = self._pull(distinct)
        self.num_received += rows.nbytes
        self.num_sent += distinct.nbytes
        rows = rows.to(ids.device)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(lambda leaf: self._reached(distinct, leaf))
        return F.embedding(where.view(ids.shape).to(ids.device), rows)

    def _reached(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self.used[id(rows)] = ids, rows

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (ids, gradients) since the last call, on the CPU, each row once; None if there are none."""
        parts = [(ids, rows.grad.cpu(), 1.0) for ids, rows in self.used.values() if rows.grad is not None]
        found = summed(parts) if parts else None
        self.drop()
        self.num_sent += sum(tensor.nbytes for tensor in found or ())
        return found

    def drop(self) -> None:
        """Discard the gradients, as zero_grad does."""
        for _, rows in self.used.values():
            rows.grad = None
        self.used = {}


def _scaled(name: str) -> UsageError:
    return UsageError(
        f"table '{name}' in float16 with a GradScaler: the scaler scales the gradients of rows and cannot unscale them",
        fix="use bfloat16, which needs no scaler",
    )


def refuse_scaler(tables: Sequence[Rows]) -> bool:
    """Tell torch's GradScaler that the optimizer does not unscale by itself. Raises UsageError if there are tables."""
    if tables:
        raise _scaled(tables[0].spec.name)
    return False
