"""The digits task: what a first run of four asynchronous workers reaches, and where its data come from."""

from __future__ import annotations

import sys

import pytest
import torch

from paramserver.common.errors import UsageError
from paramserver.worker.tasks.digits import Digits

NUM_WORKERS, BATCH = 4, 32


def test_the_held_out_fifth_is_disjoint_and_the_same_whatever_the_seed():
    torch.manual_seed(1)
    digits = Digits()
    torch.manual_seed(2)
    other = Digits()
    images, labels = digits.train_data().tensors
    assert images.shape == (1438, 1, 8, 8)
    assert images.min() == 0
    assert images.max() == 1
    assert labels.unique().tolist() == list(range(10))
    assert torch.equal(images, other.train_data().tensors[0])
    # The 1797 images are all different from one another, so comparing pixels tells train from test.
    train = {image.numpy().tobytes() for image in images}
    test = {image.numpy().tobytes() for image in digits._test[0]}
    assert len(train) + len(test) == 1797
    assert not train & test


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # what Python does for a missing module
    with pytest.raises(UsageError, match="scikit-learn") as caught:
        Digits()
    assert caught.value.fix == "pip install 'paramserver[examples]'"
