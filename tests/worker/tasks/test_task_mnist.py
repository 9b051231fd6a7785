"""The mnist task reads IDX files strictly: what is wrong is named, with what was expected and what is there."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch

from paramserver.common.errors import UsageError
from paramserver.worker.tasks.mnist import Mnist

NAMES = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]


def idx(values: torch.Tensor, *, kind: int = 8) -> bytes:
    """`values` (uint8) in the IDX format."""
    header = bytes([0, 0, kind, values.dim()]) + struct.pack(f">{values.dim()}I", *values.shape)
    return header + values.numpy().tobytes()


IMAGES = torch.arange(6 * 28 * 28).remainder(251).to(torch.uint8).view(6, 28, 28)
LABELS = torch.tensor([3, 1, 4, 1, 5, 9], dtype=torch.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).write_bytes(idx(IMAGES if "images" in name else LABELS))
    return tmp_path


@pytest.mark.parametrize("zipped", [False, True])
def test_images_and_labels_come_out_as_they_were_written(folder, zipped):
    if zipped:
        for name in NAMES:
            (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
            (folder / name).unlink()
    data = Mnist(data_dir=str(folder)).train_data()
    image, label = data[2]
    assert len(data) == 6
    assert image.dtype == torch.uint8
    assert torch.equal(image, IMAGES[2].unsqueeze(0))
    assert label == 4


def test_bytes_are_scaled_to_0_to_1_for_the_model(folder):
    task = Mnist(data_dir=str(folder), channels=[2], hidden=4)
    model = task.model()
    seen = []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    task.loss(model, task.train_data()[torch.arange(6)])
    task.evaluate(model)
    for images in seen:
        assert torch.allclose(images, IMAGES.unsqueeze(1).float() / 255)


def test_all_missing_files_are_listed_in_one_message(folder):
    (folder / NAMES[0]).unlink()
    (folder / NAMES[3]).unlink()
    with pytest.raises(UsageError) as caught:
        Mnist(data_dir=str(folder))
    assert str(folder) in caught.value.message
    assert f"2 of 4 files: {NAMES[0]}, {NAMES[3]}" in caught.value.message
    assert NAMES[1] not in caught.value.message


GOOD_IMAGES, GOOD_LABELS = idx(IMAGES), idx(LABELS)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (NAMES[0], GOOD_IMAGES[:-1], r"is 4719 bytes uncompressed, expected 4720 .* 6x28x28"),
        (NAMES[0], GOOD_IMAGES + b"x", r"is 4721 bytes uncompressed, expected 4720"),
        (NAMES[0], GOOD_IMAGES[:10], r"is 10 bytes uncompressed, expected 16"),
        (NAMES[0], b"", r"starts with nothing, expected the magic number 00000803"),
        (NAMES[0], GOOD_LABELS, r"starts with 00000801, expected the magic number 00000803"),
        (NAMES[1], GOOD_IMAGES, r"starts with 00000803, expected the magic number 00000801"),
        (NAMES[0], idx(IMAGES, kind=13), r"starts with 00000d03, expected the magic number 00000803"),
        (NAMES[2], idx(IMAGES[:, :27]), r"images are 27x28 pixels, expected 28x28"),
        (NAMES[2], idx(IMAGES[:5]), r"holds 5 images and .* 6 labels: expected equal numbers"),
        (NAMES[3], idx(LABELS + 5), r"label 14, expected 0 to 9"),
    ],
)
def test_a_wrong_file_is_named_with_expected_and_actual(folder, name, content, message):
    (folder / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        Mnist(data_dir=str(folder))
    assert str(folder / name) in caught.value.message


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(gzip.compress(GOOD_IMAGES)[:-20], id="truncated"),
        pytest.param(GOOD_IMAGES, id="not gzip"),
        pytest.param(gzip.compress(GOOD_IMAGES)[:10] + b"\xff" * 40, id="garbled"),
    ],
)
def test_a_broken_gzip_file_is_named(folder, content):
    (folder / NAMES[0]).unlink()
    path = folder / f"{NAMES[0]}.gz"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="expected a whole gzip file") as caught:
        Mnist(data_dir=str(folder))
    assert str(path) in caught.value.message
