"""The digits task: what a first run of four asynchronous workers reaches, and where its data come from."""

from __future__ import annotations

import copy
import sys

import pytest
import torch

from paramserver.common.errors import UsageError
from paramserver.worker.tasks.digits import Digits
from paramserver.worker.tasks.images import ConvNet

NUM_WORKERS, BATCH = 4, 32


@pytest.mark.slow
def test_four_workers_with_stale_gradients_reach_97_percent_in_250_steps():
    task = Digits()
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    # Each worker computes on the weights it got with its last push: three updates old, as in async.
    replicas = [copy.deepcopy(model) for _ in range(NUM_WORKERS)]
    images, labels = task.train_data().tensors
    generator = torch.Generator().manual_seed(0)
    for update in range(250 * NUM_WORKERS):
        replica = replicas[update % NUM_WORKERS]
        batch = torch.randint(len(labels), (BATCH,), generator=generator)
        replica.zero_grad()
        task.loss(replica, [images[batch], labels[batch]]).backward()
        for ours, theirs in zip(model.parameters(), replica.parameters(), strict=True):
            ours.grad = theirs.grad
        optimizer.step()
        replica.load_state_dict(model.state_dict())
    assert task.evaluate(model)["accuracy"] >= 0.97


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


def test_channels_and_hidden_set_the_size():
    with torch.device("meta"):
        small = ConvNet(side=8, channels=[4], hidden=16)
        default = ConvNet(side=8, channels=[32, 64], hidden=128)
    # conv 4*9+4, hidden 4*4*4*16+16, logits 16*10+10
    assert sum(p.numel() for p in small.parameters()) == 40 + 1040 + 170
    assert default(torch.empty(2, 1, 8, 8, device="meta")).shape == (2, 10)
    assert not list(default.buffers())


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # what Python does for a missing module
    with pytest.raises(UsageError, match="scikit-learn") as caught:
        Digits()
    assert caught.value.fix == "pip install 'paramserver[examples]'"
