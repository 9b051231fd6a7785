"""Processes that act together: all wait at a barrier, then each times the same call.

A member's life is a context manager, a top-level function `life(rank, *arguments)` of an importable
module: entered in the member's process, it yields what is measured there (turns.Measured).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ...common.config.cli import before_torch
from ...common.errors import ParamServerError
from .turns import Contestant, Measured, Samples

_START_S = 120.0
_TURN_S = 600.0
_END_S = 10.0

Life = Callable[..., Contestant]


class Team:
    """Members 0..N-1, ready to be measured. Made by `team`."""

    def __init__(self, links: list[Connection]) -> None:
        self._links = links
        self._receive_all(_START_S)

    def turns(self, count: int) -> list[Samples]:
        """`count` calls of every member, each after a barrier; the samples by rank."""
        self.start(count)
        return self.result()

    def start(self, count: int) -> None:
        for link in self._links:
            link.send(count)

    def result(self) -> list[Samples]:
        """Returns the result of the last start."""
        return self._receive_all(_TURN_S)

    def _receive_all(self, timeout_s: float) -> list[Any]:
        """Returns every member's next message by rank. Raises ParamServerError once one has failed."""
        deadline = time.monotonic() + timeout_s
        messages: dict[Connection, Any] = {}
        while len(messages) < len(self._links):
            waited_for = [link for link in self._links if link not in messages]
            ready = wait(waited_for, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ParamServerError(f"processes of a measurement said nothing for {timeout_s:g} s")
            messages |= {link: _receive(link) for link in ready if isinstance(link, Connection)}
        return [messages[link] for link in self._links]


def _receive(link: Connection) -> Any:
    try:
        message = link.recv()
    except (EOFError, OSError):
        raise ParamServerError("a process of a measurement ended before it was done") from None
    if isinstance(message, str):
        raise ParamServerError(f"a process of a measurement failed\n{message}")
    return message


@contextmanager
def team(num_members: int, life: Life, *arguments: Any) -> Iterator[Team]:
    """Run `num_members` processes, which end with the block."""
    before_torch()
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(num_members)
    pairs = [context.Pipe() for _ in range(num_members)]
    members = [
        context.Process(target=_live, args=(life, rank, arguments, barrier, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pairs)
    ]
    links = [ours for ours, _ in pairs]
    try:
        for member, (_, theirs) in zip(members, pairs, strict=True):
            member.start()
            theirs.close()
        yield Team(links)
    except BaseException:
        for member in members:
            if member.is_alive():
                member.kill()  # others may wait for it where nothing ends their waiting
        raise
    finally:
        for link in links:
            link.close()  # which a member takes as its end
        for member in members:
            if member.pid is not None:
                member.join(_END_S)
            if member.is_alive():
                member.kill()
                member.join()


def slowest(found: list[Samples]) -> Samples:
    """Returns the slowest member's time of each turn."""
    return {
        part: [max(times) for times in zip(*(samples[part] for samples in found), strict=True)] for part in found[0]
    }


@contextmanager
def rendezvous() -> Iterator[str]:
    """A `file://` address at which torch.distributed's processes find each other."""
    with tempfile.TemporaryDirectory(prefix="ps-bench-") as folder:
        yield (Path(folder) / "store").as_uri()


@contextmanager
def measured_team(workers: int, life: Life, *arguments: Any) -> Iterator[Measured]:
    """Run `life(rank, store, workers, *arguments)` in `workers` processes; the slowest counts."""
    with rendezvous() as store, team(workers, life, store, workers, *arguments) as members:
        yield lambda count: slowest(members.turns(count))


@contextmanager
def measured_pair(life: Life, *arguments: Any) -> Iterator[Measured]:
    """Run `life(rank, store, *arguments)` in two processes. Rank 0's times count."""
    with rendezvous() as store, team(2, life, store, *arguments) as members:
        yield lambda count: members.turns(count)[0]


def stay_on(device: str) -> None:
    """Make torch.distributed use this network device; call it in a member, before it starts."""
    os.environ |= {"GLOO_SOCKET_IFNAME": device, "TP_SOCKET_IFNAME": device}


def _live(life: Life, rank: int, arguments: tuple[Any, ...], barrier: Any, link: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    try:
        with life(rank, *arguments) as measured:
            link.send(None)
            while (count := _next_count(link)) is not None:
                link.send(_repeated(measured, count, barrier))
    except (BrokenPipeError, EOFError):
        pass  # the parent is gone
    except Exception:
        with suppress(OSError):
            link.send(traceback.format_exc())
    os._exit(0)  # all is said and closed; taking torch down takes a second


def _next_count(link: Connection) -> int | None:
    try:
        return int(link.recv())
    except (EOFError, OSError):
        return None


def _repeated(measured: Measured, count: int, barrier: Any) -> Samples:
    found: Samples = {}
    for _ in range(count):
        barrier.wait(_TURN_S)
        for part, times in measured(1).items():
            found.setdefault(part, []).extend(times)
    return found
