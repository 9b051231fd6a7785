"""Tables of rows that are looked up by number, as in an embedding. A step changes only the rows that have a gradient.

The optimizer is one of torch's for sparse gradients (SGD, Adagrad, SparseAdam), or `RowwiseAdagrad`. Rows without a
gradient keep their values and their state. As in torch, SparseAdam's moments of such a row do not change, but its step
count grows. The initial values of a row depend only on a seed, the table's name and the row's number. So they are equal
on every machine, for every division among shards.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from ..errors import UsageError, did_you_mean
from .layout import DTYPES
from .optimizers import (
    MAX_NUMBER,
    Hyperparameters,
    TableSpec,
    as_arguments,
    current_hyperparameters,
    known_optimizers,
    on_host,
    plain_step,
)

WEIGHT = "weight"  # beside the keys of optimizer state
_DTYPES = ("float32", "float64")
_MAX_ROWS = 2**40
MAX_ROW_BYTES = 1 << 20
_AT_ONCE = 1 << 16  # numbers made at once, few enough for the cache


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one sum for each row: the sum of the mean squared gradients of the row (as in FBGEMM).

    It works only with sparse gradients.
    """

    def __init__(self, params: Any, lr: float = 0.01, eps: float = 1e-10) -> None:
        if lr < 0 or eps < 0:
            raise ValueError(f"lr is {lr}, eps is {eps}: neither may be negative")
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # a server has no closure
        for group in self.param_groups:
            for table in group["params"]:
                gradient = table.grad.coalesce()
                ids, values = gradient.indices()[0], gradient.values()
                state = self.state[table]
                if not state:
                    state["sum"] = torch.zeros(len(table), dtype=table.dtype, device=table.device)
                sums = state["sum"].index_select(0, ids) + values.square().mean(1)
                state["sum"].index_copy_(0, ids, sums)
                table.index_add_(0, ids, values / (sums.sqrt() + group["eps"])[:, None], alpha=-group["lr"])


def make_spec(
    name: str, num_rows: int, dim: int, dtype: str, init_std: float, optimizer: str, hyperparameters: Hyperparameters
) -> TableSpec:
    """Return the spec of a whole table.

    Raises UsageError for impossible sizes or dtypes, and for an optimizer that moves rows without a gradient.
    """
    if not 1 <= num_rows <= _MAX_ROWS or dim < 1 or dtype not in _DTYPES:
        sizes = f"{num_rows} rows of {dim} numbers of {dtype}"
        raise UsageError(f"table '{name}' of {sizes}: 1 to {_MAX_ROWS} rows of {' or '.join(_DTYPES)} are possible")
    if dim * DTYPES[dtype].itemsize > MAX_ROW_BYTES:
        raise UsageError(f"table '{name}': a row of {dim} numbers has more than {MAX_ROW_BYTES} bytes")
    for key, value in hyperparameters.items():
        if isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
            raise UsageError(f"table '{name}': {key} is {value!r}; at most {MAX_NUMBER:g} is possible")
    if not 0 <= init_std < float("inf"):
        raise UsageError(f"table '{name}': init_std is {init_std}; it is 0 or more")
    cls = _rows_optimizer(optimizer, hyperparameters)
    hyperparameters = current_hyperparameters(hyperparameters)
    return TableSpec(name, num_rows, dim, dtype, float(init_std), cls.__name__, hyperparameters, 0, num_rows)


@on_host()
def _rows_optimizer(name: str, hyperparameters: Mapping[str, Any]) -> type[torch.optim.Optimizer]:
    """Return the class of this name, in any case, after a trial with these arguments. Raises UsageError."""
    known = {**known_optimizers(), "rowwiseadagrad": RowwiseAdagrad}
    cls = known.get(name.lower().replace("_", ""))
    usable = "sgd, adagrad, rowwise_adagrad and sparse_adam"
    if cls is None:
        raise UsageError(f"no optimizer '{name}' for rows", fix=did_you_mean(name.lower(), known))
    accepted = [key for key in inspect.signature(cls).parameters if key not in ("self", "params")]
    for key in hyperparameters:
        if key not in accepted:
            raise UsageError(f"optimizer '{name}' has no argument '{key}'", fix=did_you_mean(key, accepted))
    if not torch.sparse.check_sparse_tensor_invariants.is_enabled():
        torch.sparse.check_sparse_tensor_invariants.disable()  # already disabled; this only avoids torch's warning
    start = torch.linspace(-1, 1, 12, device="cpu").view(4, 3)
    table, ids = torch.nn.Parameter(start.clone()), torch.tensor([1, 3], device="cpu")
    try:
        optimizer = cls([table], **as_arguments(hyperparameters))
        for scale in (1.0, -0.5):
            table.grad = _sparse(ids, start[ids] * scale, 4)
            plain_step(cls)(optimizer)
    except Exception as error:  # torch's classes fail in their own ways on sparse gradients
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"optimizer '{name}' cannot step rows: {problem}", fix=f"{usable} can") from None
    state = [value for value in optimizer.state[table].values() if isinstance(value, torch.Tensor)]
    is_of_rows = all(not tensor.is_sparse and (not tensor.dim() or len(tensor) == 4) for tensor in state)
    if not is_of_rows or not torch.equal(table[::2], start[::2]):
        raise UsageError(f"optimizer '{name}' with {dict(hyperparameters)} is not one for rows", fix=f"{usable} are")
    return cls


def _sparse(ids: torch.Tensor, values: torch.Tensor, num_rows: int) -> torch.Tensor:
    size, device = (num_rows, values.shape[1]), values.device
    return torch.sparse_coo_tensor(ids[None], values, size, is_coalesced=True, check_invariants=False, device=device)


def summed(parts: Sequence[tuple[torch.Tensor, torch.Tensor, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (distinct ascending ids, sum of values times factor for each id) over `parts`.

    Each part has distinct ascending ids, int64 [n], values [n, dim] and a factor. Sums are added in the order of the
    parts. The result may share memory with a part.
    """
    parts = [(ids, values if factor == 1.0 else values * factor, factor) for ids, values, factor in parts]
    if len(parts) == 1:
        return parts[0][:2]
    ids, where = torch.cat([part[0] for part in parts]).unique(return_inverse=True)
    values = parts[0][1]
    total = values.new_zeros(len(ids), values.shape[1])
    return ids, total.index_add_(0, where, torch.cat([part[1] for part in parts]))


class Table:
    """This shard's rows of a table, with their optimizer.

    A row takes memory for `dim` numbers, and as many for each key of optimizer state: Adagrad has one, SparseAdam two,
    SGD none. RowwiseAdagrad has one number a row. Without a seed, the rows are uninitialized until `set_state`.
    """

    def __init__(self, spec: TableSpec, seed: int | None) -> None:
        self.spec = spec
        weight = torch.empty(spec.end - spec.first, spec.dim, dtype=DTYPES[spec.dtype], device="cpu")
        if seed is not None:
            _fill(weight, spec, seed)
        self.weight = torch.nn.Parameter(weight)
        cls = _rows_optimizer(spec.optimizer, spec.hyperparameters)
        self.torch = cls([self.weight], **as_arguments(spec.hyperparameters))
        self._step = plain_step(cls)

    def change(self, spec: TableSpec) -> None:
        """Set the hyperparameters of `spec`, which is otherwise equal to the table's spec."""
        self.spec = spec
        self.torch.param_groups[0].update(as_arguments(spec.hyperparameters))

    def set_lr(self, lr: float | None) -> None:
        if lr is not None:
            self.torch.param_groups[0]["lr"] = lr

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a copy of these rows, [n, dim]."""
        return self.weight.detach().index_select(0, ids - self.spec.first)

    def step(self, ids: torch.Tensor, gradient: torch.Tensor, lr_scale: float = 1.0) -> str:
        """Step the rows `ids`, distinct and ascending, along `gradient` [n, dim], with the rate times `lr_scale`.

        Returns "", or a phrase that names the first row with NaN or Inf.
        """
        (group,) = self.torch.param_groups
        lr = group["lr"]
        group["lr"] = lr * lr_scale
        self.weight.grad = _sparse(ids - self.spec.first, gradient, len(self.weight))
        self._step(self.torch)
        self.weight.grad, group["lr"] = None, lr
        if math.isfinite(self.rows(ids).sum().item()):
            return ""
        wrong = ids[~torch.isfinite(self.rows(ids)).all(1)].tolist()
        return f"NaN or Inf in row {wrong[0]:,} of table '{self.spec.name}'" if wrong else ""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state().values())

    def state(self) -> dict[str, torch.Tensor]:
        """Return weight and optimizer state by key. Tensors share memory, and numbers are 0-dim tensors."""
        kept = {WEIGHT: self.weight.detach(), **self.torch.state.get(self.weight, {})}
        return {key: torch.as_tensor(value, device="cpu") for key, value in kept.items()}

    def set_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a copy of `state`. Raises ValueError for the state of another table."""
        if WEIGHT not in state:
            raise ValueError(f"table '{self.spec.name}' is missing")
        whole = self.weight.shape
        for key, value in state.items():
            is_one = value.shape == whole or (key != WEIGHT and value.shape == whole[:1])
            is_number = key != WEIGHT and not value.dim()
            if not is_number and not (is_one and value.dtype == self.weight.dtype):
                raise ValueError(f"{key} of table '{self.spec.name}' is {value.dtype} {list(value.shape)}")
        optimizer_state = self.torch.state[self.weight]
        for key, value in state.items():
            current = self.weight.detach() if key == WEIGHT else optimizer_state.get(key)
            if isinstance(current, torch.Tensor):
                current.copy_(value)
            else:
                optimizer_state[key] = value.clone() if value.dim() else value.item()


def _fill(weight: torch.Tensor, spec: TableSpec, seed: int) -> None:
    """Fill `weight` with nearly normal numbers of mean 0 and standard deviation `init_std`.

    Each number is the sum of four uniform 16-bit numbers, from one hash (splitmix64) of table, row and column. All
    steps except the last use integers, so the numbers are equal on every machine.
    """
    salt = np.uint64(int.from_bytes(blake2b(f"{seed}/{spec.name}".encode(), digest_size=8).digest(), "little"))
    scale = spec.init_std / ((65536**2 - 1) / 3) ** 0.5
    flat, low = weight.view(-1).numpy(), np.uint64(0xFFFF)
    first, num = spec.first * spec.dim, len(flat)
    counts = np.arange(_AT_ONCE, dtype=np.uint64)
    for at in range(0, num, _AT_ONCE):
        bits = counts[: num - at] + np.uint64(first + at)
        bits *= np.uint64(0x9E3779B97F4A7C15)
        bits ^= salt
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            bits ^= bits >> np.uint64(shift)
            bits *= np.uint64(factor)
        total = bits & low
        for shift in (16, 32, 48):
            total += (bits >> np.uint64(shift)) & low
        flat[at : at + _AT_ONCE] = (total.astype(np.float64) - 131070.0) * scale
