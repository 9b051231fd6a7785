"""Result files of a run: checked before training, written atomically."""

from __future__ import annotations

import fcntl
import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ..config.schema import Config
from ..errors import OutputError
from .curve import Point, text_of
from .log import get_logger
from .report import print_results, summary_table
from .summary import RESULTS_VARIABLE, Summary

if TYPE_CHECKING:
    import torch

log = get_logger()

_TEMPORARY = ".tmp"


def check_writable(path: str) -> None:
    """Raise OutputError if `path` cannot be written; called before training."""
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


def write_whole(path: Path, data: bytes, mode: int = 0o666, is_synced: bool = True) -> None:
    """Write a file atomically: the old file stays until the new file is complete. `mode`: its permissions."""
    with replacing(path, mode, is_synced) as file:
        file.write(data)


def write_result(path: str | Path, data: bytes) -> None:
    """Write a file of results atomically. Raises OutputError."""
    try:
        write_whole(Path(path), data, is_synced=False)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from None


@contextmanager
def replacing(path: Path, mode: int = 0o666, is_synced: bool = True) -> Iterator[BinaryIO]:
    """Yield a file to write. It replaces the old file when the block ends without an error."""
    if path.exists() and not path.is_file():  # a device, a pipe
        with path.open("wb") as file:
            yield file
        return
    path = path.resolve()  # replace the target of a link, not the link
    _remove_leftovers(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_TEMPORARY}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(descriptor, "wb") as file:
            with suppress(OSError):  # not supported on all file systems
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield file
            file.flush()
            if is_synced:
                os.fsync(descriptor)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_leftovers(path: Path) -> None:
    """Delete temporary files of processes killed while they wrote `path`; a live writer has a lock."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*{_TEMPORARY}"):
        with suppress(OSError), leftover.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()


def write_best(path: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write the weights of the best evaluation so far; log an error if they cannot be written."""
    from safetensors.torch import save  # loads torch, which the launcher does without

    try:
        found = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        write_whole(Path(path), save(found, metadata))
        log.info("saved_best", path=path, version=int(metadata["version"]))
    except OSError as error:
        log.error("best_not_saved", path=path, reason=str(error))


def write_curve(path: str, points: list[Point]) -> None:
    """Write all evaluations so far; log an error if they cannot be written."""
    try:
        write_whole(Path(path), text_of(points, path).encode(), is_synced=False)
    except OSError as error:
        log.error("curve_not_written", path=path, reason=str(error))


def write_results(config: Config, summary: Summary, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write the weights, if any, and the summary to the files in `config.output`, and print or hand over the summary.

    The weights are safetensors, for `model.load_state_dict(load_file(path))`. The same file has `metadata`, whose
    `version` is the version of the weights. Raises OutputError if a file cannot be written.
    """
    output = config.output
    try:
        if output.save is not None and tensors:
            from safetensors.torch import save  # loads torch, which the launcher does without

            write_whole(Path(output.save), save(tensors, metadata))
            log.info("saved", path=output.save, version=int(metadata["version"]))
        if output.summary is not None:
            write_whole(Path(output.summary), summary.text().encode(), is_synced=False)
        if descriptor := os.environ.pop(RESULTS_VARIABLE, ""):  # of a launcher, which prints them
            with open(int(descriptor), "w", encoding="utf-8") as file:
                file.write(summary.text())
            return
    except OSError as error:
        raise OutputError(f"cannot write the results: {error}", fix="free some space and run again") from None
    if config.log.format == "json":
        log.info("summary", **summary.model_dump())
    else:
        print_results(summary_table(summary))
