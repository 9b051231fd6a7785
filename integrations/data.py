"""Divides the batches of a trainer's own loader among the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from ..common.errors import ParamServerError, UsageError
from ..common.reporting.log import get_logger
from ..common.tensors.generators import Generators
from ..worker.training.session import Session

log = get_logger()

PLACE = "paramserver"


def num_ranks(session: Session) -> int:
    """Returns the number of workers that share the data. Raises UsageError if it is not configured."""
    if not session.settings.num_workers:
        message = "a trainer divides its data before it begins, and the server takes any number of workers"
        raise UsageError(message, fix="ps-server --workers N")
    return session.settings.num_workers


class RankSampler(Sampler[int]):
    """Draws every W-th sample of another sampler, beginning with the rank-th, as DistributedSampler does.

    It repeats samples from the beginning, so that all shares are equal. The batches of all ranks at a step equal one
    batch of a single process that is W times as large. The sampler ends with the run.
    """

    def __init__(self, base: Sampler[int], session: Session) -> None:
        self._base, self._session, self._num_ranks = base, session, num_ranks(session)
        self.epoch, self._first_epoch, self._num_passed = 0, 0, 0
        self._shift = 0  # samples by which the run is ahead of the trainer's epochs

    def __len__(self) -> int:
        return -(-len(self._base) // self._num_ranks)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; trainers call this before each epoch."""
        self.epoch = epoch

    def go_to(self, step: int, own_step: int, loader: Any, accumulate: int, is_first: bool = True) -> None:
        """Move to training step `step` of the run, while the trainer counts `own_step`.

        The next epoch of `loader` is then the epoch of `step`, or the epoch after it if it would end between two steps.
        A step uses `accumulate` batches. `is_first`: no epoch has passed since.
        """
        num_batches, batch_size = len(loader), sizes_of(loader)[0] or 1
        per_epoch = -(-num_batches // accumulate)
        if num_batches % accumulate and step % per_epoch != own_step % per_epoch:
            step += per_epoch - step % per_epoch
        if step != own_step and own_step % per_epoch:  # the trainer skips the batches before its checkpoint
            self._shift = (step - own_step) * accumulate * batch_size
            return
        self._first_epoch = step // per_epoch - own_step // per_epoch
        if is_first:
            self._num_passed = max(0, step % per_epoch - own_step % per_epoch) * accumulate * batch_size

    def __iter__(self) -> Iterator[int]:
        if self._session.is_over():
            return
        epoch, first = divmod(self._shift, len(self))
        epoch, first, self._num_passed = epoch + self.epoch + self._first_epoch, first + self._num_passed, 0
        share = self._share(epoch)[first:]
        if self._shift:
            share += self._share(epoch + 1)[:first]
        for sample in share:
            if self._session.is_done:
                return
            yield sample

    def _share(self, epoch: int) -> list[int]:
        order = self._draw(epoch)
        order += order[: len(self) * self._num_ranks - len(order)]
        return order[self._session.rank :: self._num_ranks]

    def _draw(self, epoch: int) -> list[int]:
        """Returns the same order on all ranks, independent of their random state."""
        seed, device = self._session.settings.seed + epoch, torch.device("cpu")
        if hasattr(self._base, "set_epoch"):
            self._base.set_epoch(epoch)
        if isinstance(generator := getattr(self._base, "generator", None), torch.Generator):
            device = generator.manual_seed(seed).device
        if hasattr(self._base, "initial_seed"):  # Accelerate's: seeds itself with this + epoch
            self._base.initial_seed = self._session.settings.seed
        with Generators(seed).drawn_from(), device:
            return list(self._base)


def say_clipping(session: Session, setting: str) -> None:
    """Log a warning if a trainer clips the gradients that this rank sends."""
    if not session.settings.kind.worker_steps and session.settings.num_workers > 1:
        log.warning(
            "clips_each_rank",
            meaning=f"{setting} clips the gradient of each rank, not the mean of all as a process group would",
            fix="ps-server --clip-norm clips the mean (sync); switch the trainer's off",
        )


def place_in(session: Session) -> dict[str, Any]:
    """Returns the state of the run for a trainer's checkpoint, stored under `PLACE`."""
    return {"run": session.run_name, "steps": session.step}


def step_of_trainer(session: Session, own_step: int, saved: dict[str, Any] | None) -> int:
    """Returns the trainer's step for a checkpoint of `own_step`.

    The checkpoint may be from this run, or the run may have begun with it.
    """
    is_same = saved is not None and saved["run"] == place_in(session)["run"]
    return own_step + session.step - (saved["steps"] if saved is not None and is_same else 0)


def say_lost(session: Session, num_steps: int) -> None:
    """Log a warning if the trainer counts more steps (`num_steps`) than the run has."""
    if (lost := num_steps - session.step) > 0:
        log.warning("steps_not_in_the_weights", num=lost, meaning="a scaler skipped them, and the trainer counted them")


def check_place(session: Session) -> None:
    """Raises ParamServerError if the run moved: its loader and counters are elsewhere, and a trainer cannot move them.

    A new process begins at the run's step, so a launcher that starts it again mends this.
    """
    if session.has_moved:
        raise ParamServerError(
            f"the run is at step {session.step}, where the server went back to a snapshot or went on without this "
            "worker; the trainer is at another step, and its next batches would be other ones",
            fix="start this worker again: it begins at the run's step (ps-launch does so by itself)",
        )


def catch_up(scheduler: Any, num_steps: int) -> None:
    """Step a scheduler to the run's step. A scheduler that needs a metric is left alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the optimizer has not stepped
        while not isinstance(scheduler, ReduceLROnPlateau) and scheduler.last_epoch < num_steps:
            scheduler.step()


def divide(loader: Any, session: Session) -> RankSampler | None:
    """Give a loader this rank's share of the data, and return its sampler.

    Returns None if the loader already divides the data or has no map-style data set. An iterable data set divides
    itself.
    """
    batches: Any = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    if sampler is None or isinstance(sampler, (DistributedSampler, RankSampler)):
        return sampler if isinstance(sampler, RankSampler) else None
    batches.sampler = share = RankSampler(sampler, session)
    return share


def sizes_in(batch: Any) -> list[int]:
    """Returns the lengths of the tensors of a batch, and of its lists of texts or numbers, in their order."""
    if isinstance(batch, torch.Tensor):
        return [len(batch)] if batch.dim() else []
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else []
    if isinstance(batch, (list, tuple)) and batch and all(isinstance(part, (str, int, float)) for part in batch):
        return [len(batch)]
    return [size for part in parts for size in sizes_in(part)]


def num_samples_in(batch: Any, loader: Any) -> int:
    """Returns the number of samples in a batch of a loader.

    It is that of a full batch, or that of the last one, which has the rest of the samples and whose tensors show it. A
    loader that does not say its batch size has the length of the first tensor.
    """
    full, rest = sizes_of(loader)
    sizes = sizes_in(batch)
    if rest is None:
        found = [size for size in sizes if 0 < size <= (full or size)]
        return full if full in found else found[0] if found else full or 1
    return rest if rest in sizes and full not in sizes else full


def sizes_of(loader: Any) -> tuple[int, int | None]:
    """Returns the samples of a full batch of this rank (0: not known), and of its last one (None: not known)."""
    batches: Any = getattr(loader, "batch_sampler", None)
    full = int(getattr(batches, "batch_size", None) or 0)
    sampler: Any = getattr(batches, "sampler", None)
    if not full or not hasattr(sampler, "__len__"):
        return full, None
    return full, (0 if getattr(batches, "drop_last", False) else len(sampler) % full) or full
