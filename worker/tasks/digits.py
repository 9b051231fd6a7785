"""Handwritten digits, 8x8 pixels: 1797 real images that come with scikit-learn, so nothing is downloaded.

The task for a first run and for comparing modes: real data, seconds per run, an accuracy to look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from ...common.errors import UsageError
from .base import check_whole, evaluating

_SIDE = 8  # pixels
_TEST_FRACTION = 0.2  # 359 images
_SPLIT_SEED = 1797  # of the held-out split: fixed, so that runs with different seeds can be compared
_EVAL_BATCH = 1024  # images per forward pass of an evaluation; bounds its memory


class Digits:
    """scikit-learn's digits and a small CNN; the data are equal in every process, whatever the run's seed.

    Held-out accuracy over five seeds after 300 steps of four workers, batch 32: Adam with lr 0.002
    0.978 to 0.989 in sync and 0.981 to 0.989 in async; SGD with lr 0.1 0.916 to 0.953 and 0.975 to
    0.983. Momentum 0.9 and stale gradients do not go together: with lr 0.05 async learns nothing.
    """

    def __init__(self, *, channels: Sequence[int] = (32, 64), hidden: int = 128) -> None:
        self._channels = check_channels(channels, side=_SIDE)
        self._hidden = check_whole("hidden", hidden, least=1)
        images, labels = _load()  # (1797, 1, 8, 8) in 0..1, (1797,)
        num_test = round(len(images) * _TEST_FRACTION)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(_SPLIT_SEED))
        test, train = order[:num_test], order[num_test:]
        self._train = TensorDataset(images[train], labels[train])
        self._test_images, self._test_labels = images[test], labels[test]

    def model(self) -> nn.Module:
        return ConvNet(side=_SIDE, channels=self._channels, hidden=self._hidden)

    def train_data(self) -> Dataset[Any]:
        """Samples: image (1, 8, 8) float32 in 0..1, label () int64."""
        return self._train

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch  # (B, 1, 8, 8), (B,)
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """`loss` (nats per image) and `accuracy` (0..1) on the held-out images."""
        return evaluate_classifier(model, self._test_images, self._test_labels)


class ConvNet(nn.Module):
    """One block of 3x3 convolution, ReLU and 2x2 max-pooling per entry of `channels`, then two linear layers.

    Images (B, 1, side, side) -> logits (B, num_classes). No BatchNorm: it would make the figures
    of a mode depend on how the server merges buffers.
    """

    def __init__(self, *, side: int, channels: Sequence[int], hidden: int, num_classes: int = 10) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for num_in, num_out in zip([1, *channels], channels, strict=False):
            blocks += [nn.Conv2d(num_in, num_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            side //= 2
        self.features = nn.Sequential(*blocks)
        self.classifier = nn.Sequential(
            nn.Flatten(),  # (B, C, side, side) -> (B, C * side * side)
            nn.Linear(channels[-1] * side * side, hidden),
            nn.ReLU(),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images))


def check_channels(channels: Any, *, side: int) -> tuple[int, ...]:
    """`channels` as a tuple of positive ints, few enough that halving `side` for each leaves a pixel."""
    if not isinstance(channels, list | tuple) or not channels:
        raise UsageError(
            f"task.args.channels is {channels!r}, not a list of whole numbers", fix="e.g. channels: [32, 64]"
        )
    most = side.bit_length() - 1
    if len(channels) > most:
        raise UsageError(
            f"task.args.channels has {len(channels)} entries: each halves the {side}-pixel image,"
            f" so {most} is the limit",
            fix=f"give at most {most} channels, e.g. channels: [32, 64]",
        )
    return tuple(check_whole(f"channels[{i}]", value, least=1) for i, value in enumerate(channels))


def evaluate_classifier(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Mean cross-entropy (nats) and accuracy (0..1) of `model` on images (N, 1, H, W) and labels (N,)."""
    total_loss, num_correct = 0.0, 0
    with evaluating(model) as device:
        for x, y in zip(images.split(_EVAL_BATCH), labels.split(_EVAL_BATCH), strict=True):
            x, y = x.to(device), y.to(device)
            logits = model(x)  # (B, 10)
            total_loss += F.cross_entropy(logits, y, reduction="sum").item()
            num_correct += int((logits.argmax(1) == y).sum())
    return {"loss": total_loss / len(labels), "accuracy": num_correct / len(labels)}


def _load() -> tuple[torch.Tensor, torch.Tensor]:
    """All images (1797, 1, 8, 8) float32 scaled to 0..1, and labels (1797,) int64."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError(
            f"the digits task reads its images from scikit-learn, which cannot be imported: {error}",
            fix="pip install 'paramserver[examples]'",
        ) from error
    digits = load_digits()  # grey levels 0..16
    images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)
    return images, torch.from_numpy(digits.target).long()


ENTRY = Digits
