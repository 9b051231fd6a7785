"""A rank's share of the batches that a trainer's own loader makes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.distributed import DistributedSampler

from ..common.errors import UsageError
from ..common.reporting.log import get_logger
from ..worker.training.session import Session

log = get_logger()

PLACE = "paramserver"


def num_ranks(session: Session) -> int:
    """Workers the data is divided among: trainers want to know before they begin. UsageError where nobody has said."""
    if not session.settings.num_workers:
        raise UsageError(
            "a trainer divides its data before it begins, and the server takes any number of workers",
            fix="ps-server --workers N",
        )
    return session.settings.num_workers


class RankSampler(Sampler[int]):
    """Every W-th of what another sampler draws, from the rank-th on, as DistributedSampler: filled up with samples
    from the beginning, so that all shares are equal. The ranks' batches at a step are then what one process with
    batches W times as large trains on. Ends with the run."""

    def __init__(self, base: Sampler[int], session: Session) -> None:
        self._base, self._session, self._num_ranks = base, session, num_ranks(session)
        self.epoch, self._first_epoch, self._num_behind = 0, 0, 0
        self._shift = 0  # samples by which the run is ahead of the trainer's epochs

    def __len__(self) -> int:
        return -(-len(self._base) // self._num_ranks)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Trainers say which one comes."""
        self.epoch = epoch

    def go_to(
        self, step: int, own_step: int, num_batches: int, batch_size: int, accumulate: int, is_first: bool = True
    ) -> None:
        """This rank is at training step `step` of the run, and the trainer counts `own_step`: the next epoch is the one
        that this rank was in. The next one after it where that would end between two steps. `is_first`: none has
        gone by since."""
        per_epoch = -(-num_batches // accumulate)
        if num_batches % accumulate and step % per_epoch != own_step % per_epoch:
            step += per_epoch - step % per_epoch
        if step != own_step and own_step % per_epoch:  # the trainer skips what its checkpoint has behind it
            self._shift = (step - own_step) * accumulate * batch_size
            return
        self._first_epoch = step // per_epoch - own_step // per_epoch
        if is_first:
            self._num_behind = max(0, step % per_epoch - own_step % per_epoch) * accumulate * batch_size

    def __iter__(self) -> Iterator[int]:
        if self._session.is_over():
            return
        epoch, first = divmod(self._shift, len(self))
        epoch, first, self._num_behind = epoch + self.epoch + self._first_epoch, first + self._num_behind, 0
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
        """The same on all ranks, whatever each has seeded and drawn before."""
        seed = self._session.settings.seed + epoch
        if hasattr(self._base, "set_epoch"):
            self._base.set_epoch(epoch)
        if isinstance(generator := getattr(self._base, "generator", None), torch.Generator):
            generator.manual_seed(seed)
        if hasattr(self._base, "initial_seed"):  # Accelerate's: seeds itself with this + epoch
            self._base.initial_seed = self._session.settings.seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return list(self._base)


def say_clipping(session: Session, setting: str) -> None:
    """Where a trainer clips what this rank sends."""
    if not session.settings.kind.worker_steps and session.settings.num_workers > 1:
        log.warning(
            "clips_each_rank",
            meaning=f"{setting} clips the gradient of each rank, not the mean of all as a process group would",
            fix="ps-server --clip-norm clips the mean (sync); switch the trainer's off",
        )


def place_in(session: Session) -> dict[str, Any]:
    """What a trainer's checkpoint says of the run, under `PLACE`."""
    return {"run": session.run_name, "steps": session.step}


def step_of_trainer(session: Session, own_step: int, saved: dict[str, Any] | None) -> int:
    """Where a trainer is that comes with a checkpoint of `own_step`: the run may have been begun with it, or be the one
    it was written in."""
    is_same = saved is not None and saved["run"] == place_in(session)["run"]
    return own_step + session.step - (saved["steps"] if saved is not None and is_same else 0)


def say_lost(session: Session, num_steps: int) -> None:
    """At the end of a trainer that has taken so many of the run's steps, by its own count."""
    if (lost := num_steps - session.step) > 0:
        log.warning(
            "steps_not_in_the_weights",
            num=lost,
            meaning="the server went back to a snapshot while the trainer counted on, or a scaler skipped them",
        )


def catch_up(scheduler: Any, num_steps: int) -> None:
    """A schedule that a trainer's checkpoint left where the run no longer is. Not one that needs a metric."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer has not stepped
        while not isinstance(scheduler, ReduceLROnPlateau) and scheduler.last_epoch < num_steps:
            scheduler.step()


def divide(loader: Any, session: Session) -> RankSampler | None:
    """Let a loader have this rank's share; None where that is not to be done: the loader divides already, or has no
    map-style data set (an iterable one divides itself)."""
    batches: Any = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    if sampler is None or isinstance(sampler, (DistributedSampler, RankSampler)):
        return sampler if isinstance(sampler, RankSampler) else None
    batches.sampler = share = RankSampler(sampler, session)
    return share


def samples_of(loader: DataLoader[Any] | None) -> int:
    """In a batch of a rank."""
    return int(getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or 1)
