"""Divides a data set among workers, and loads one worker's batches from a given position on."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from ...common.errors import UsageError
from ..ownership import die_with_parent
from .position.sources import StreamPass, is_stream, pieces, share_of, streamed


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor on `device`. Copies from pinned memory do not block."""
    if isinstance(batch, torch.Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        parts = [to_device(value, device) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def step_seed(seed: int, rank: int, step: int) -> int:
    """Return a random seed for one step of one rank.

    torch's generator of the CPU uses only the low 32 bits of a seed. So all three are mixed into these, by the last
    steps of splitmix64, which give different numbers of 64 bits for different ones.
    """
    mixed = (seed << 32 ^ rank << 52 ^ step) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return (mixed ^ mixed >> 31) % 2**63


def seed_everything(seed: int) -> None:
    """Seed torch's generators, as `torch.manual_seed` does.

    Without a GPU, `torch.manual_seed` records a stack trace for each call, which takes 200 to 600 us. Seeding the CPU
    generator takes 1 us.
    """
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@cache
def _has_accelerator() -> bool:
    """Whether torch could use an accelerator.

    The check does not start CUDA, because a process that has started it cannot fork.
    """
    kind = torch.accelerator.current_accelerator()  # the kind that this torch was built for
    return kind is not None and (kind.type != "cuda" or torch.cuda.device_count() > 0)


@dataclass(frozen=True)
class Shares:
    """A data set, and how it is divided among workers.

    Every epoch has one order of the samples, which is the same for all ranks: torch's permutation of seed + epoch, or
    the data set's own order without `shuffle`. With W workers and batches of B, step s of the epoch uses `order[s*W*B :
    (s+1)*W*B]`, the union batch. Rank r takes every W-th sample of it, starting at the r-th. One process with batches
    of W*B would train on the same samples. This also holds at the end of an epoch: no sample is used twice, and the
    mean weights each share by its number of samples.

    When fewer samples than workers are left, the other workers compute a sample a second time. The weights are chosen
    so that the weighted mean counts each remaining sample once.

    `pads`: fill the last batches with samples from the beginning of the order, as DistributedSampler does. `drop_last`:
    leave out the last union batch if it is not full. `sampler`: use its order instead of the permutation; all ranks
    draw the same order from it (`draw`).

    A data set without a length (`is_stream`) keeps its own order: every rank reads all of it and keeps its share.
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
                fix="leave the sampler out, or give session.shard() a sampler that draws for all ranks",
            )

    @property
    def num_samples(self) -> int:
        """Samples in an epoch; 0: not known. Raises UsageError for a sampler without a length."""
        if is_stream(self.dataset):
            return 0
        source: Any = self.dataset if self.sampler is None else self.sampler
        try:
            return len(source)
        except TypeError:
            message = f"{type(source).__name__} has no length, so it cannot be divided among workers"
            raise UsageError(message, fix="give it a __len__") from None

    def num_batches(self, num_workers: int) -> int:
        """Batches of each rank in an epoch; 0: not known. Raises UsageError if there are too few samples to divide."""
        num_samples = self.num_samples
        if is_stream(self.dataset):
            return 0
        union = num_workers * self.batch_size
        least = union if self.drop_last else 1 if self.pads else num_workers
        if num_samples < least:
            needs = f"{num_workers} workers need {least} or more" + (" (drop_last)" if self.drop_last else "")
            size = f"holds {num_samples} sample{'s' * (num_samples != 1)}" if num_samples else "is empty"
            raise UsageError(f"the data set {size}; {needs}", fix="use fewer workers, or a larger data set")
        return num_samples // union if self.drop_last else -(-num_samples // union)

    def batches_of(self, epoch: int, num_workers: int, index: int) -> Iterator[tuple[torch.Tensor, int]]:
        """One rank's batches of an epoch: the indices of the samples, and the batch's weight in samples.

        A sampler's order is drawn as it is needed, because it may be longer than memory.
        """
        union = num_workers * self.batch_size
        for rows in self._unions(epoch, union, num_workers):
            if len(rows) == union or not self.drop_last:
                yield share_of(rows, index, num_workers)

    def _unions(self, epoch: int, union: int, num_workers: int) -> Iterator[torch.Tensor]:
        """The samples of all workers for each step. The last ones are padded if `pads` is set."""
        num_samples = self.num_samples
        if self.sampler is not None:
            parts = draw(self.sampler, self.seed, epoch, union)
        else:
            if self.shuffle:
                generator = torch.Generator().manual_seed(self.seed + epoch)
                order = torch.randperm(num_samples, generator=generator, device="cpu")
            else:
                order = torch.arange(num_samples, device="cpu")
            parts = iter(order.split(union))
        begin, count = torch.tensor([], dtype=torch.int64, device="cpu"), 0
        for rows in parts:
            if self.pads and len(begin) < num_workers:
                begin = torch.cat([begin, rows[: num_workers - len(begin)]])
            count += len(rows)
            if self.sampler is not None and (count > num_samples or (len(rows) < union and count != num_samples)):
                break
            missing = -len(rows) % num_workers if self.pads else 0
            yield torch.cat([rows, begin.repeat(missing)[:missing]]) if missing else rows
        if count != num_samples:
            gave = f"more than {num_samples}" if count > num_samples else str(count)
            message = f"{type(self.sampler).__name__} says that it has {num_samples} samples, and gave {gave}"
            raise UsageError(message, fix="make its __len__ equal to the number of samples from its __iter__")


def draw(sampler: Any, seed: int, epoch: int, size: int) -> Iterator[torch.Tensor]:
    """Yield the order of an epoch from a sampler, `size` indices at a time. It is the same on all ranks.

    The sampler must draw from the generators of torch, Python or NumPy, or from one of torch in its attribute
    `generator`. What it draws is independent of what the script draws meanwhile.
    """
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
        generator.manual_seed(seed + epoch)
    for indices in pieces(sampler, seed + epoch, size, device="cpu"):
        yield torch.tensor([int(index) for index in indices], dtype=torch.int64, device="cpu")


def sharded_batches(
    shares: Shares, division: Callable[[], tuple[int, int]], first: int, **loader_options: Any
) -> Iterator[tuple[Any, int]]:
    """Yield batches of one worker's share without end, without the first `first` ones.

    `division()` returns (num_workers, index) and is called at each epoch.
    """
    loader = Loader(shares, loader_options)
    for number in itertools.count():
        num_batches = yield from loader.pass_batches(number, division(), first)
        first = max(0, first - num_batches)


class Loader:
    """Loads the batches of a worker's share. `options` are those of DataLoader.

    It is the batch sampler of a single DataLoader, so loader processes can stay alive between epochs
    (persistent_workers).
    """

    def __init__(self, shares: Shares, options: dict[str, Any]) -> None:
        self._shares, self._dataset, self.options = shares, shares.dataset, options
        self._generator = torch.Generator()
        self._plan: Iterator[tuple[torch.Tensor, int]] = iter(())
        self._weights: deque[int] = deque()  # of the batches that are being loaded
        self._loader: DataLoader[Any] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        for rows, num_samples in self._plan:
            self._weights.append(num_samples)
            yield rows.tolist()

    def pass_batches(self, number: int, division: tuple[int, int], first: int) -> Generator[tuple[Any, int], None, int]:
        """Yield the batches of pass `number` without the first `first` ones, each with its weight in samples.

        Returns the number of batches of the pass. Batches are skipped without being loaded, except those of a stream.
        """
        shares, seed = self._shares, self._shares.seed + number
        if is_stream(shares.dataset):
            stream: Any = shares.dataset
            collate = self.options.get("collate_fn") or default_collate
            once = StreamPass(stream, seed, shares.batch_size, *division, first, shares.drop_last, collate)
            return (yield from streamed(once, number, self.options))
        num_batches = shares.num_batches(division[0])
        if first < num_batches:
            plan = itertools.islice(shares.batches_of(number, *division), first, None)
            yield from self._load(plan, step_seed(shares.seed, division[1], number))
        return num_batches

    def _load(self, plan: Iterator[tuple[torch.Tensor, int]], seed: int) -> Iterator[tuple[Any, int]]:
        """Yield a batch, with its weight, for each list of sample indices in `plan`."""
        if type(self._dataset) is TensorDataset and not self.options:
            # One index operation per batch instead of one per sample is 60 times faster for small samples.
            for rows, num_samples in plan:
                yield [tensor[rows.to(tensor.device)] for tensor in self._dataset.tensors], num_samples
            return
        self._plan, self._weights = plan, deque()
        # A DataLoader draws a seed when it begins. If it drew from the script's generator, that generator would differ
        # after a resume.
        self._generator.manual_seed(seed)
        if self._loader is None:
            options = {"generator": self._generator} | self.options
            if options.get("num_workers"):
                options["worker_init_fn"] = partial(_begin_loader, options.get("worker_init_fn"))
            self._loader = DataLoader(self._dataset, batch_sampler=self, **options)
        with torch.device("cpu"):  # torch draws its seed on the default device
            batches = iter(self._loader)
        for batch in batches:
            yield batch, self._weights.popleft()


def _begin_loader(then: Callable[[int], None] | None, index: int) -> None:
    """Make a loader process end with its worker (Linux), then call `then`.

    A forked loader has copies of the worker's connections. If it outlived a killed worker, the server would wait for
    the lease.
    """
    die_with_parent()
    if then is not None:
        then(index)
