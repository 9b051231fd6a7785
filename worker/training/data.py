"""Batches of one worker's share of a data set, from the right position, until the run says stop."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from ...common.errors import UsageError
from .position.stream import is_stream, share_of_few, streamed_batches

_PR_SET_PDEATHSIG = 1  # prctl.h


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


def seed_everything(seed: int) -> None:
    """`torch.manual_seed`. Without a GPU that notes each time a stack for the day one appears: 200 to 600 us, of which
    what is there takes 1."""
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@cache
def _has_accelerator() -> bool:
    """Starts none: a process that has started CUDA cannot fork."""
    kind = torch.accelerator.current_accelerator()  # that this torch is made for
    return kind is not None and (kind.type != "cuda" or torch.cuda.device_count() > 0)


@dataclass(frozen=True)
class Shares:
    """A data set, and how it is divided among workers.

    Every epoch has one order of the samples, the same for all ranks (torch's permutation of seed + epoch; without
    `shuffle` their own). With W workers and batches of B, step s of the epoch is made of `order[s*W*B : (s+1)*W*B]`,
    the union batch: rank r has every W-th of it from the r-th on. It is what one process with batches of W*B would
    train on, also at the end of an epoch: no sample comes twice, and shares that differ are weighted by their samples.

    Where fewer samples are left than workers, those without one compute another's, and the weights of all are chosen
    so that the weighted mean is that of the samples left, each counted once.

    `pads`: the last batches are filled up with samples from the beginning of the order, as DistributedSampler does.
    `drop_last`: a last union batch that is not full is left out.
    `sampler`: its order instead of that permutation, drawn alike on all ranks (`draw`).
    A data set without a length (`is_stream`) comes in its own order: every rank reads all of it and keeps its share.
    """

    dataset: Dataset[Any]
    batch_size: int
    seed: int
    shuffle: bool = True
    pads: bool = False
    drop_last: bool = False
    sampler: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.sampler, DistributedSampler):
            raise UsageError(
                "session.shard() divides the data itself, and so does a DistributedSampler",
                fix="leave the sampler out, or give session.shard() the one that draws for all ranks",
            )

    @property
    def is_stream(self) -> bool:
        return is_stream(self.dataset)

    @property
    def num_samples(self) -> int:
        """In an epoch; 0: nobody knows. UsageError for a sampler that does not say."""
        if self.is_stream:
            return 0
        source: Any = self.dataset if self.sampler is None else self.sampler
        try:
            return len(source)
        except TypeError:
            raise UsageError(
                f"{type(source).__name__} has no length, so it cannot be divided among workers",
                fix="give session.shard() one with __len__",
            ) from None

    def num_batches(self, num_workers: int) -> int:
        """Of every rank in an epoch; 0: nobody knows. UsageError when the data set cannot be divided so."""
        num_samples = self.num_samples
        if self.is_stream:
            return 0
        union = num_workers * self.batch_size
        least = union if self.drop_last else 1 if self.pads else num_workers
        if num_samples < least:
            needs = f"{num_workers} workers need {least} or more" + (" (drop_last)" if self.drop_last else "")
            size = f"holds {num_samples} sample{'s' * (num_samples != 1)}" if num_samples else "is empty"
            raise UsageError(f"the data set {size}; {needs}", fix="use fewer workers, or a larger data set")
        return num_samples // union if self.drop_last else -(-num_samples // union)

    def batches_of(self, epoch: int, num_workers: int, index: int) -> list[tuple[torch.Tensor, int]]:
        """One rank's batches of an epoch: the samples' indices, and the number of samples that the batch counts as."""
        num_batches, union = self.num_batches(num_workers), num_workers * self.batch_size
        order = self._order(epoch)
        if self.pads:
            order = order.repeat(1 - -num_workers // len(order))[: -(-len(order) // num_workers) * num_workers]
        found = [(rows, len(rows)) for rows in order[index::num_workers].split(self.batch_size)][:num_batches]
        num_left = len(order) % union  # for the last step
        if num_left < num_workers and num_left and not self.drop_last:
            which, num_samples = share_of_few(index, num_workers, num_left)
            at = len(order) - num_left + which
            found[num_batches - 1 :] = [(order[at : at + 1], num_samples)]
        return found

    def _order(self, epoch: int) -> torch.Tensor:
        num_samples = self.num_samples
        if self.sampler is not None:
            order = draw(self.sampler, self.seed, epoch)
            if len(order) != num_samples:
                message = f"{type(self.sampler).__name__} says that it has {num_samples} samples, and gave {len(order)}"
                raise UsageError(message, fix="let its __len__ be what its __iter__ gives")
            return torch.tensor(order, dtype=torch.int64)
        if not self.shuffle:
            return torch.arange(num_samples)
        return torch.randperm(num_samples, generator=torch.Generator().manual_seed(self.seed + epoch))


def draw(sampler: Any, seed: int, epoch: int) -> list[int]:
    """What a sampler gives in an epoch: the same on all ranks, whatever each has seeded and drawn before, as long as it
    draws from torch's generator or from one of its own that is its attribute `generator`."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
        generator.manual_seed(seed + epoch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + epoch)
        return [int(index) for index in sampler]


def sharded_batches(
    shares: Shares, division: Callable[[], tuple[int, int]], first: int, **loader_options: Any
) -> Iterator[tuple[Any, int]]:
    """Yields endless batches of a share that `division()` (num_workers, index) gives, with the samples each counts as.

    The division is asked for again at each epoch. `first` batches are skipped without being loaded, so that a worker
    that comes back goes on where its rank was.
    """
    if shares.is_stream:
        sizes = (shares.dataset, shares.batch_size, shares.seed, shares.drop_last)
        yield from streamed_batches(*sizes, division, first, loader_options)
    loader = Loader(shares.dataset, loader_options)
    for epoch in itertools.count():
        num_workers, index = division()
        num_batches = shares.num_batches(num_workers)
        if first < num_batches:
            yield from epoch_batches(shares, epoch, (num_workers, index), first, loader)
        first = max(0, first - num_batches)


def epoch_batches(
    shares: Shares, epoch: int, division: tuple[int, int], first: int, loader: Loader
) -> Iterator[tuple[Any, int]]:
    """Those of one epoch, without the `first` ones."""
    plan = shares.batches_of(epoch, *division)[first:]
    loaded = loader.load([rows for rows, _ in plan], shares.seed + epoch)
    return zip(loaded, (num_samples for _, num_samples in plan), strict=True)


class Loader:
    """Loads batches of samples by their numbers; `options` are DataLoader's. It is the batch sampler of one DataLoader,
    whose processes may so stay from epoch to epoch (persistent_workers)."""

    def __init__(self, dataset: Dataset[Any], options: dict[str, Any]) -> None:
        self._dataset, self._options = dataset, options
        self._generator = torch.Generator()
        self._plan: list[torch.Tensor] = []
        self._loader: DataLoader[Any] | None = None

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[list[int]]:
        return (rows.tolist() for rows in self._plan)

    def load(self, plan: list[torch.Tensor], seed: int) -> Iterator[Any]:
        """One batch for each of `plan`."""
        if type(self._dataset) is TensorDataset and not self._options:
            # One index operation a batch instead of one a sample: 60 times faster for small samples.
            for rows in plan:
                yield [tensor[rows.to(tensor.device)] for tensor in self._dataset.tensors]
            return
        self._plan = plan
        # A loader draws its own seed when it begins: not from the generator of the script, which would then be
        # elsewhere after a resume than without one.
        self._generator.manual_seed(seed)
        if self._loader is None:
            options = {"generator": self._generator} | self._options
            if options.get("num_workers"):
                options["worker_init_fn"] = partial(_begin_loader, options.get("worker_init_fn"))
            self._loader = DataLoader(self._dataset, batch_sampler=self, **options)
        yield from self._loader


def _begin_loader(then: Callable[[int], None] | None, index: int) -> None:
    """A forked loader has copies of this worker's connections, which end with the last copy: it must not outlive
    a worker that is killed, or the server would wait for the lease (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if then is not None:
        then(index)
