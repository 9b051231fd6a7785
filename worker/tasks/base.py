"""The interface of a task: four methods. Any object with them is a task; nothing needs to be inherited.

The constructor gets `task.args` of the configuration. Parameters named `seed` (int) and `device` (torch.device) get the
run's seed and the worker's device unless `task.args` sets them.

A built-in task has a static method `num_elements`, too. It returns the numbers that the data, the model and the
activations of one sample take for these arguments. A worker limits them if the arguments come from a server.

If a task's model has running statistics in layers of its own, an attribute `averaged_buffers` names them, as in
`session.optimizer()`.

The rest of this file has helpers of the built-in tasks: argument checks and evaluations.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from ...common.errors import UsageError


class Task(Protocol):
    """A model, its data, its loss and its evaluation."""

    def model(self) -> nn.Module:
        """Return a new model. torch is seeded before the call, so equal seeds give equal weights."""

    def train_data(self) -> Dataset[Any]:
        """Return the training data, which is divided by rank.

        A TensorDataset is indexed one batch at a time. Every rank reads all of an IterableDataset and keeps its part.
        An optional method `sampler(dataset)` returns the order of the samples of all ranks (torch's Sampler).
        """

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the scalar mean loss of `batch`. A DataLoader made the batch; it is on the model's device."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return held-out metrics by name, including `loss`."""


def check_whole(key: str, value: object, *, least: int, most: int | None = None) -> int:
    """Return `value`, a whole number in [least, most]. Raises UsageError about `task.args.<key>` for other values."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"task.args.{key} is {value!r}, not a whole number", fix=f"e.g. {key}: {least}")
    return int(check_number(key, value, least=least, most=most))


def check_number(key: str, value: object, *, least: float, most: float | None = None) -> float:
    """Return `value`, a finite number in [least, most]. Raises UsageError about `task.args.<key>` for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        # YAML reads 1e-3 as text because it has no dot, which explains the hint.
        raise UsageError(f"task.args.{key} is {value!r}, not a number", fix=f"e.g. {key}: 0.001, or 1.0e-3")
    if value < least or (most is not None and value > most):
        limit = f"at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"task.args.{key} is {value}: it must be {limit}", fix=f"set {key} {limit}")
    return value


@contextmanager
def evaluating(model: nn.Module) -> Iterator[torch.device]:
    """Disable gradients and set evaluation mode inside; restore the mode afterwards. Yields the parameters' device."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        model.train(was_training)


def held_out_means(
    model: nn.Module,
    samples: tuple[torch.Tensor, ...],
    measure: Callable[..., dict[str, torch.Tensor]],
    batch_size: int = 1024,
) -> dict[str, float]:
    """Return mean metrics by name over `samples`, tensors of shape (N, ...).

    `measure` returns sums over a batch on the model's device. `batch_size` limits the memory of an evaluation.
    """
    sums: dict[str, float] = defaultdict(float)
    with evaluating(model) as device:
        for batch in zip(*(tensor.split(batch_size) for tensor in samples), strict=True):
            for name, value in measure(*(tensor.to(device) for tensor in batch)).items():
                sums[name] += value.item()
    return {name: value / len(samples[0]) for name, value in sums.items()}


# ---- images ---------------------------------------------------------------------------------------
# Shared parts of the image tasks: a small CNN, its loss, and its metrics on held-out images.


NUM_CLASSES = 10
_EXAMPLE = "e.g. channels: [32, 64]"


class ImageTask:
    """A task that sets `_train` and `_test`: images (N, 1, side, side), float32 in 0..1 or bytes, and labels (N,)."""

    _train: TensorDataset
    _test: tuple[torch.Tensor, torch.Tensor]

    def __init__(self, side: int, channels: Sequence[int], hidden: int) -> None:
        self._side = side
        # Each entry halves `side`, and at least one pixel must remain.
        if not isinstance(channels, list | tuple) or not channels:
            raise UsageError(f"task.args.channels is {channels!r}, not a list of whole numbers", fix=_EXAMPLE)
        most = side.bit_length() - 1
        if len(channels) > most:
            message = f"task.args.channels has {len(channels)} entries: each halves the {side}-pixel image"
            raise UsageError(f"{message}, so {most} is the limit", fix=_EXAMPLE)
        self._channels = tuple(check_whole(f"channels[{i}]", value, least=1) for i, value in enumerate(channels))
        self._hidden = check_whole("hidden", hidden, least=1)

    @staticmethod
    def num_elements(*, channels: Sequence[int], hidden: int, **_: Any) -> int:
        """As in `Task`, of images of 28 x 28 pixels."""
        sizes = [1, *channels]
        kernels = sum(9 * num_in * num_out for num_in, num_out in pairwise(sizes))
        return kernels + 784 * max(sizes) + sizes[-1] * (28 >> len(channels)) ** 2 * hidden

    def model(self) -> nn.Module:
        return conv_net(self._side, self._channels, self._hidden)

    def train_data(self) -> Dataset[Any]:
        """Samples are an image (1, side, side) and a label ()."""
        return self._train

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch  # (B, 1, side, side), (B,)
        return F.cross_entropy(model(_scaled(images)), labels.long())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return `loss` (nats per image) and `accuracy` (0..1) on the held-out images."""

        def measure(images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = model(_scaled(images))  # (B, NUM_CLASSES)
            loss = F.cross_entropy(logits, labels.long(), reduction="sum")
            return {"loss": loss, "accuracy": (logits.argmax(1) == labels).sum()}

        return held_out_means(model, self._test, measure)


def conv_net(side: int, channels: Sequence[int], hidden: int) -> nn.Sequential:
    """One block of 3x3 convolution, ReLU and 2x2 max-pooling per entry of `channels`, then two linear layers.

    Images (B, 1, side, side) float32 in 0..1 -> logits (B, NUM_CLASSES). It has no BatchNorm, because the metrics of a
    mode would depend on how the server merges buffers.
    """
    blocks: list[nn.Module] = []
    for num_in, num_out in pairwise([1, *channels]):
        blocks += [nn.Conv2d(num_in, num_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    side >>= len(channels)
    classifier = nn.Sequential(
        nn.Flatten(),  # (B, C, side, side) -> (B, C * side * side)
        nn.Linear(channels[-1] * side * side, hidden),
        nn.ReLU(),
        nn.Linear(hidden, NUM_CLASSES),
    )
    return nn.Sequential(OrderedDict(features=nn.Sequential(*blocks), classifier=classifier))


def _scaled(images: torch.Tensor) -> torch.Tensor:
    """Convert bytes (grey levels) to float32 in 0..1."""
    return images.float().div(255) if images.dtype is torch.uint8 else images
