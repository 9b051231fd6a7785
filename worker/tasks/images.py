"""Shared parts of the image tasks: a small CNN, its loss, and its metrics on held-out images."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from ...common.errors import UsageError
from .base import check_whole, held_out_means

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
