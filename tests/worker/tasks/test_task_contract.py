"""What holds for every built-in task, found through the registry: the promises the trainer relies on."""

from __future__ import annotations

import gzip
import struct

import pytest
import torch
from torch.utils.data import Dataset

from paramserver.common.errors import UsageError
from paramserver.common.registry import TASKS
from paramserver.worker.tasks.base import Task
from paramserver.worker.training.tasks.loading import load_task

CPU = torch.device("cpu")
SMALL = {
    "gpt": {"context": 16, "num_layers": 1, "num_heads": 2, "width": 16, "max_bytes": 50_000, "eval_bytes": 2048},
    "xor": {"num_samples": 2_000},
    "linear": {"num_samples": 2_000},
    "mnist": {"channels": [4, 8], "hidden": 16},
}


@pytest.fixture(scope="session")
def mnist_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four IDX files of 64 images: class k is a bright bar in the rows 2k and 2k + 1. One is gzipped."""
    folder = tmp_path_factory.mktemp("mnist")
    labels = torch.arange(64) % 10
    images = torch.zeros(64, 28, 28, dtype=torch.uint8)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[2 * label : 2 * label + 2] = 255
    packed_images = struct.pack(">4B3I", 0, 0, 8, 3, 64, 28, 28) + images.numpy().tobytes()
    packed_labels = struct.pack(">4BI", 0, 0, 8, 1, 64) + labels.byte().numpy().tobytes()
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(packed_images))
    (folder / "t10k-images-idx3-ubyte").write_bytes(packed_images)
    for part in ("train", "t10k"):
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(packed_labels)
    return str(folder)


@pytest.fixture(params=TASKS.names())
def make(request: pytest.FixtureRequest, mnist_dir: str):
    """A function of the seed that makes the task small."""
    name = request.param
    args = SMALL.get(name, {}) | ({"data_dir": mnist_dir} if name == "mnist" else {})
    return lambda seed=0: load_task(name, args, seed=seed, device=CPU)


def _model(task: Task) -> torch.nn.Module:
    torch.manual_seed(0)
    return task.model()


def _batch(data: Dataset, indices: list[int]) -> list[torch.Tensor]:
    return torch.utils.data.default_collate([data[i] for i in indices])


def test_every_weight_gets_a_gradient_once_training_has_begun(make):
    task = make()
    model = _model(task)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = _batch(task.train_data(), list(range(16)))
    # Three times: weights that begin at zero let no gradient through to what lies below them.
    for _ in range(3):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
    assert loss.shape == ()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


def test_the_loss_is_a_mean_so_that_batches_weigh_by_their_samples(make):
    task = make()
    model = _model(task)
    data = task.train_data()
    with torch.no_grad():
        whole, first, rest = (
            task.loss(model, _batch(data, [*indices])).item() for indices in (range(12), range(4), range(4, 12))
        )
    assert whole == pytest.approx((4 * first + 8 * rest) / 12, rel=1e-4)


def test_training_lowers_the_held_out_loss(make):
    task = make()
    model = _model(task)
    before = task.evaluate(model)["loss"]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = task.train_data()
    for step in range(30):
        indices = [(step * 32 + i) % len(data) for i in range(32)]
        optimizer.zero_grad()
        task.loss(model, _batch(data, indices)).backward()
        optimizer.step()
    assert task.evaluate(model)["loss"] < 0.9 * before


def test_equal_seeds_give_equal_data_and_a_batch_can_be_taken_at_once(make):
    first, second = make(seed=3).train_data(), make(seed=3).train_data()
    indices = [5, 0, 7]
    one_by_one = _batch(first, indices)
    at_once = second[torch.tensor(indices)]  # what the trainer does with a TensorDataset
    assert all(torch.equal(a, b) for a, b in zip(one_by_one, at_once, strict=True))


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_leaves_the_model_as_it_was_and_repeats_itself(make, training):
    task = make()
    model = _model(task).train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen_modes = []
    model.register_forward_pre_hook(lambda m, _: seen_modes.append((m.training, torch.is_grad_enabled())))
    metrics = task.evaluate(model)
    assert metrics == task.evaluate(model)
    assert all(type(value) is float for value in metrics.values())
    assert "loss" in metrics
    assert set(seen_modes) == {(False, False)}
    assert model.training is training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_mode_is_restored_when_an_evaluation_fails(make):
    task = make()
    model = _model(task)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        task.evaluate(model)
    assert model.training


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("digits", {"hidden": 0}, r"task\.args\.hidden is 0: it must be at least 1"),
        ("digits", {"hidden": 1.5}, r"task\.args\.hidden is 1\.5, not a whole number"),
        ("digits", {"hidden": True}, r"task\.args\.hidden is True, not a whole number"),
        ("digits", {"channels": 32}, r"task\.args\.channels is 32, not a list"),
        ("digits", {"channels": []}, r"task\.args\.channels is \[\], not a list"),
        ("digits", {"channels": [8, -1]}, r"task\.args\.channels\[1\] is -1: it must be at least 1"),
        ("digits", {"channels": [8] * 4}, r"4 entries: each halves the 8-pixel image, so 3 is the limit"),
        ("mnist", {"data_dir": 5}, r"task\.args\.data_dir is 5, not a folder"),
        ("xor", {"d": 1}, r"task\.args\.d is 1: it must be at least 2"),
        ("xor", {"label_noise": 0.6}, r"task\.args\.label_noise is 0\.6: it must be from 0 to 0\.5"),
        ("xor", {"label_noise": "1e-3"}, r"task\.args\.label_noise is '1e-3', not a number"),
        ("xor", {"label_noise": float("nan")}, r"task\.args\.label_noise is nan, not a number"),
        ("linear", {"noise": -1}, r"task\.args\.noise is -1: it must be at least 0"),
        ("linear", {"device": "gpu"}, r"task\.args\.device is 'gpu'"),
        ("gpt", {"width": 20}, r"task\.args\.width is 20: not a multiple of 2 \* num_heads, 8"),
        ("gpt", {"text": 5}, r"task\.args\.text is 5, not a path"),
        ("gpt", {"context": 1}, r"task\.args\.context is 1: it must be at least 2"),
    ],
)
def test_a_wrong_argument_is_named_with_its_limit_and_value(name, args, message):
    with pytest.raises(UsageError, match=message) as caught:
        load_task(name, args, seed=0, device=CPU)
    assert caught.value.fix
