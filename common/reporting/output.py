"""Files a run leaves behind: checked before training, written whole."""

from __future__ import annotations

import fcntl
import glob
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ..config.schema import Config
from ..errors import OutputError
from .curve import Point, text_of
from .log import get_logger
from .report import report_console, summary_table
from .summary import Summary

if TYPE_CHECKING:
    import torch

log = get_logger()

_TEMPORARY = ".tmp"


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


def write_whole(path: Path, data: bytes, mode: int = 0o666, is_synced: bool = True) -> None:
    """What was there stays until the new is whole. `mode` is the file's from its first byte on."""
    with replacing(path, mode, is_synced) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, mode: int = 0o666, is_synced: bool = True) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of what was there when it is whole."""
    if path.exists() and not path.is_file():  # a device, a pipe
        with path.open("wb") as file:
            yield file
        return
    path = path.resolve()  # what a link names is written, the link stays
    _remove_leftovers(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_TEMPORARY}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(descriptor, "wb") as file:
            with suppress(OSError):  # not everywhere
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield file
            file.flush()
            if is_synced:
                os.fsync(descriptor)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_leftovers(path: Path) -> None:
    """Of processes that were killed while they wrote `path`; one that writes holds a lock."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*{_TEMPORARY}"):
        with suppress(OSError), leftover.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()


def write_best(path: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Weights of an evaluation that was better than all before; a log line where they cannot be written."""
    from safetensors.torch import save  # loads torch, which the launcher does without

    try:
        found = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        write_whole(Path(path), save(found, metadata))
        log.info("saved_best", path=path, version=int(metadata["version"]))
    except OSError as error:
        log.error("best_not_saved", path=path, reason=str(error))


def write_curve(path: str, points: list[Point]) -> None:
    """All evaluations so far; a log line where they cannot be written."""
    try:
        write_whole(Path(path), text_of(points, path).encode(), is_synced=False)
    except OSError as error:
        log.error("curve_not_written", path=path, reason=str(error))


def write_results(config: Config, summary: Summary, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """The weights, if there are any, and the summary, where `config.output` says; the summary also to whoever looks.

    The weights are safetensors, for `model.load_state_dict(load_file(path))`; `metadata` goes into the same file, its
    `version` is theirs. OutputError when something cannot be written.
    """
    output = config.output
    try:
        if output.save is not None and tensors:
            from safetensors.torch import save  # loads torch, which the launcher does without

            write_whole(Path(output.save), save(tensors, metadata))
            log.info("saved", path=output.save, version=int(metadata["version"]))
        if output.summary is not None:
            write_whole(Path(output.summary), summary.text().encode(), is_synced=False)
    except OSError as error:
        raise OutputError(f"cannot write the results: {error}", fix="free some space and run again") from None
    if config.log.format == "json":
        log.info("summary", **summary.model_dump())
    else:
        report_console(sys.stdout).print(summary_table(summary))
