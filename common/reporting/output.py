"""Files a run leaves behind: checked before training, written whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import OutputError

if TYPE_CHECKING:
    import torch


def check_writable(path: str) -> None:
    """Raise OutputError now if `path` could not be written at the end of training."""
    target = Path(path)
    parent = target.parent
    if target.is_dir():
        raise OutputError(f"cannot write {path}: it is a directory", fix="name a file in it")
    if not parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no directory {parent}", fix=f"mkdir -p {parent}")
    probe = parent / f".{target.name}.{os.getpid()}.probe"
    try:
        probe.touch()
        probe.unlink()
        if target.exists():
            with target.open("ab"):
                pass
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}", fix="choose a path you may write to") from None


def write_weights(path: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write safetensors for `model.load_state_dict(load_file(path))`; the old file stays until the new is whole."""
    from safetensors.torch import save  # loads torch, which the launcher does without

    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(save(tensors, metadata))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
