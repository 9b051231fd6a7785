"""MNIST, or a data set in its format (Fashion-MNIST, KMNIST), from the four standard IDX files in a folder.

Nothing is downloaded. The format is two zero bytes, the element type (8: unsigned byte), the number of dimensions, each
dimension as 4 bytes big-endian, then the elements with the last dimension fastest.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from ...common.errors import UsageError
from .base import NUM_CLASSES, ImageTask

_SIDE = 28  # pixels
_UNSIGNED_BYTE = 0x08
_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_FIX = "put the four files of the MNIST distribution there, gzipped (.gz) or not"


class Mnist(ImageTask):
    """28x28 images in ten classes, with the CNN of the digits task. The t10k files are held out.

    Images stay bytes until a batch is used, which takes 47 MB instead of 188.
    """

    def __init__(self, *, data_dir: str = "data/mnist", channels: Sequence[int] = (32, 64), hidden: int = 128) -> None:
        super().__init__(_SIDE, channels, hidden)
        paths = _find(data_dir)
        self._train = TensorDataset(*_read_images_and_labels(paths, "train"))
        self._test = _read_images_and_labels(paths, "test")


def _find(data_dir: Any) -> dict[str, Path]:
    """Return the path of each file by its plain name. Raises one UsageError that lists all missing files."""
    if not isinstance(data_dir, str | Path):
        raise UsageError(f"task.args.data_dir is {data_dir!r}, not a folder", fix="e.g. data_dir: data/mnist")
    folder = Path(data_dir).expanduser()
    names = [name for pair in _FILES.values() for name in pair]
    found = {name: path for name in names for path in (folder / f"{name}.gz", folder / name) if path.is_file()}
    if missing := [name for name in names if name not in found]:
        problem = f"task.args.data_dir {folder.absolute()} lacks {len(missing)} of 4 files"
        raise UsageError(f"{problem}: {', '.join(missing)}", fix=_FIX)
    return found


def _read_images_and_labels(paths: dict[str, Path], part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (N, 1, 28, 28) and labels (N,), both uint8. Raises UsageError if they do not match."""
    images_path, labels_path = (paths[name] for name in _FILES[part])
    images, labels = _read_idx(images_path, num_dims=3), _read_idx(labels_path, num_dims=1)
    if images.shape[1:] != (_SIDE, _SIDE):
        height, width = images.shape[1:]
        raise UsageError(f"{images_path}: images are {height}x{width} pixels, expected 28x28", fix=_FIX)
    if len(images) == 0 or len(images) != len(labels):
        numbers = f"{images_path} holds {len(images)} images and {labels_path} {len(labels)} labels"
        raise UsageError(f"{numbers}: expected equal numbers, at least 1", fix=_FIX)
    if int(labels.max()) >= NUM_CLASSES:
        raise UsageError(f"{labels_path}: label {int(labels.max())}, expected 0 to {NUM_CLASSES - 1}", fix=_FIX)
    return images.unsqueeze(1), labels


def _read_idx(path: Path, *, num_dims: int) -> torch.Tensor:
    """Read the IDX file of unsigned bytes at `path`, gzipped if its name ends in .gz: uint8, `num_dims` axes.

    Raises UsageError with the file, the expected value and the found value.
    """
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{path}: expected a whole gzip file, but: {error}", fix=_FIX) from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}", fix="make the file readable") from error
    magic, num_header_bytes = bytes([0, 0, _UNSIGNED_BYTE, num_dims]), 4 + 4 * num_dims
    if content[:4] != magic:
        start = content[:4].hex() or "nothing"
        raise UsageError(f"{path}: starts with {start}, expected the magic number {magic.hex()}", fix=_FIX)
    shape = struct.unpack_from(f">{num_dims}I", content.ljust(num_header_bytes, b"\0"), 4)
    expected, size = num_header_bytes + math.prod(shape), "x".join(map(str, shape))
    if len(content) != expected:
        raise UsageError(f"{path}: is {len(content)} bytes uncompressed, expected {expected} for {size}", fix=_FIX)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[num_header_bytes:].view(shape)


ENTRY = Mnist
