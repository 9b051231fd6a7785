"""Programs on hosts of links.py, forked from a process that has torch loaded: a start takes a fraction of a second."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

from .links import Host
from .server_process import undisturbed

_LOADED = ("torch.distributed", "safetensors.torch", "paramserver.ps.server", "paramserver.worker.training.session")
_NEW_NETWORK, _DEATH_SIGNAL = 0x40000000, 1  # CLONE_NEWNET, PR_SET_PDEATHSIG
_NAMESPACES = Path("/run/netns")


@dataclass(frozen=True)
class Program:
    """A module whose `main` runs with these arguments. `log` has what it writes."""

    module: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    log: Path

    def run(self, namespace: str) -> None:
        """Become this program, in this network namespace."""
        os.setsid()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)
        with (_NAMESPACES / namespace).open() as file:
            if libc.setns(file.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
        with self.log.open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ.clear()
        os.environ.update(self.environment)
        multiprocessing.set_start_method("fork", force=True)  # the default, which a forked program expects
        sys.argv = [self.module, *self.argv]
        importlib.import_module(self.module).main()


@contextlib.contextmanager
def running(programs: Sequence[tuple[Host, Program]]) -> Iterator[list[BaseProcess]]:
    """Run these programs until the block ends; then they, and what they have started, are killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_LOADED))
    process: BaseProcess
    started: list[BaseProcess] = []
    try:
        for host, program in programs:
            process = context.Process(target=program.run, args=(host.namespace,))
            with undisturbed():
                process.start()
                started.append(process)
        yield started
    finally:
        with undisturbed():
            for process in started:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid or 0, signal.SIGKILL)
                process.kill()  # one that is not a group of its own yet
                process.join()


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """End the process that programs are forked from with the block."""
    try:
        yield
    finally:
        with undisturbed():
            forkserver._forkserver._stop()  # type: ignore[attr-defined]
