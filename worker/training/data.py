"""Batches of one worker's share of a data set, from the right position, until the run says stop."""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from ...common.errors import UsageError

_PR_SET_PDEATHSIG = 1  # prctl.h


def num_samples_of(batch: Any) -> int:
    """Length of the first tensor found in a batch; 0 when there is none."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for part in batch:
            if found := num_samples_of(part):
                return found
    return 0


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on `device`; copies from pinned memory do not wait."""
    if isinstance(batch, torch.Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        parts = [to_device(value, device) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def step_seed(seed: int, rank: int, step: int) -> int:
    """A seed for what a rank draws at a step; any two differ (for seeds, ranks and steps in their limits)."""
    return (seed << 32 ^ rank << 52 ^ step) % 2**63


def sharded_batches(
    dataset: Dataset[Any],
    batch_size: int,
    seed: int,
    division: Callable[[], tuple[int, int]],
    first_step: int,
    **loader_options: Any,
) -> Iterator[Any]:
    """Endless batches of the share that `division()` (num_workers, index) gives, reshuffled every epoch.

    The division is asked for again at each epoch. `first_step` batches are skipped without being
    loaded, so that a worker that comes back goes on where its rank was.
    """
    step, epoch = 0, 0
    while True:
        num_workers, index = division()
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_workers, index, shuffle=True, seed=seed)
        sampler.set_epoch(epoch)
        num_batches = -(-len(sampler) // batch_size)
        if num_batches == 0:
            raise UsageError("the data set is empty", fix="train_data() must hold at least one sample")
        skip = min(num_batches, max(0, first_step - step))
        if skip < num_batches:
            indices = list(sampler)[skip * batch_size :]
            yield from _load(dataset, indices, batch_size, loader_options)
        step += num_batches
        epoch += 1


def _load(dataset: Dataset[Any], indices: list[int], batch_size: int, options: dict[str, Any]) -> Iterator[Any]:
    if type(dataset) is TensorDataset and not options:
        # One index operation a batch instead of one a sample: 60 times faster for small samples.
        order = torch.tensor(indices)
        for start in range(0, len(indices), batch_size):
            rows = order[start : start + batch_size]
            yield [tensor[rows.to(tensor.device)] for tensor in dataset.tensors]
    else:
        if options.get("num_workers"):
            options = options | {"worker_init_fn": partial(_begin_loader, options.get("worker_init_fn"))}
        yield from DataLoader(dataset, batch_size, sampler=indices, **options)


def _begin_loader(then: Callable[[int], None] | None, index: int) -> None:
    """A forked loader has copies of this worker's connections, which end with the last copy: it must not outlive
    a worker that is killed, or the server would wait for the lease (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if then is not None:
        then(index)
