"""How members of a generation find each other, and which of those that do not come together is to go.

A group is of all its members or it is none: one that others cannot reach, while all reach the server, holds everyone
up. So all say whom they reach before they connect, and whoever fails counts how often it did, with the same members.
It ends at a number that depends on what is known: the one whose going helps most ends first, and when it has gone the
others average without it.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from ....common.errors import UsageError
from .cut import Address
from .store import Store, StoreServer

# Attempts in a row with the same members before this one ends: where the reason is here, is elsewhere, is not known.
HERE, ELSEWHERE, UNKNOWN = 3, 6, 9

_REACH_S = 5.0  # for a connection to a member


class Generation(NamedTuple):
    """Who averages: said by the server."""

    number: int  # grows
    members: tuple[int, ...]  # ranks, ascending
    store: Address  # of the lowest's `Rendezvous`
    name: str = ""  # that no other generation has, of all that have met there
    secret: bytes = b""  # given to its members alone

    @property
    def full_name(self) -> str:
        return f"generation/{self.name or self.number}"


class Rendezvous:
    """A place where members of a generation find each other; every worker has one, the lowest rank's is used."""

    def __init__(self, host: str) -> None:
        """UsageError without the backend."""
        if not (dist.is_available() and dist.is_gloo_available()):
            message = f"this worker cannot average with the others: its torch {torch.__version__} is without Gloo"
            raise UsageError(message, fix="install a torch with distributed support, or --mode sync")
        self._server = StoreServer(host)
        self.address = self._server.address

    def admit(self, generation: Generation) -> None:
        """Its members may come from now on."""
        self._server.admit(generation.full_name, generation.secret)

    def close(self) -> None:
        self._server.close()


class Here(NamedTuple):
    """What a member tells the others of itself."""

    device: str
    own: Address  # of its `Rendezvous`
    listens: Address  # where others connect to it


class Broken(Exception):
    """A member is gone, or cannot be waited for: the group of this generation is over. `attempts`: after so many of
    these
    in a row this worker ends."""

    def __init__(self, told: str, attempts: int = UNKNOWN) -> None:
        super().__init__(told)
        self.attempts = attempts


class OutOfReach(Broken):
    """One does not reply at its address: it is gone, or its address is not for this host."""


def store_of(generation: Generation, rank: int, timeout_s: float) -> Store:
    """OutOfReach, Broken."""
    # Of two the one that does not reach the other goes; of more the lowest does, where nobody comes to its store.
    reach(rank, generation.members[0], generation.store, HERE if len(generation.members) == 2 else ELSEWHERE)
    try:
        return Store(lambda: (generation.store, generation.secret), generation.full_name, rank, timeout_s)
    except TimeoutError:  # it is there, and has not heard of this generation
        raise _missing([generation.members[0]], rank, generation, timeout_s) from None
    except OSError as error:
        raise Broken(f"generation {generation.number}: its store is gone: {first_line(error)}") from None


def come_together(store: dist.Store, generation: Generation, rank: int, here: Here, timeout_s: float) -> list[Here]:
    """All members, by index, once each has said that it reaches all others. Broken where one does not come in
    `timeout_s` (which: in the sentence) or cannot be reached."""
    device, *addresses = here
    store.set(f"here/{rank}", " ".join([device, *map(shown, addresses)]))
    try:
        said = [text.split() for text in _all(store, "here", generation, rank, timeout_s)]
        members = [Here(device, _address(own), _address(listens)) for device, own, listens in said]
        with ThreadPoolExecutor(len(members)) as threads:
            failed = list(threads.map(lambda item: _failed(rank, *item), zip(generation.members, members, strict=True)))
        lost = [member for member, error in zip(generation.members, failed, strict=True) if error is not None]
        store.set(f"lost/{rank}", " ".join(map(str, lost)) or "-")
        said = [text.split() for text in _all(store, "lost", generation, rank, timeout_s + _REACH_S)]
    except RuntimeError as error:
        raise Broken(f"generation {generation.number}: its store is gone: {first_line(error)}") from None
    graph = {
        who: {int(item) for item in whom if item != "-"} for who, whom in zip(generation.members, said, strict=True)
    }
    if (going := who_goes(graph)) is not None:
        found = next(filter(None, failed), None) or Broken(_told(rank, graph))
        found.attempts = HERE if going == rank else ELSEWHERE
        raise found
    return members


def _all(store: dist.Store, what: str, generation: Generation, rank: int, timeout_s: float) -> list[str]:
    """What each member has said of this, by index. Broken, RuntimeError."""
    until = time.monotonic() + timeout_s
    missing = [member for member in generation.members if member != rank]
    while missing and time.monotonic() < until:
        with suppress(dist.DistStoreError):
            left_s = max(0.001, until - time.monotonic())
            store.wait([f"{what}/{member}" for member in missing], timedelta(seconds=left_s))
        missing = [member for member in missing if not store.check([f"{what}/{member}"])]
    if missing:
        raise _missing(missing, rank, generation, timeout_s)
    return [store.get(f"{what}/{member}").decode() for member in generation.members]


def _missing(missing: Sequence[int], rank: int, generation: Generation, timeout_s: float) -> Broken:
    """These did not come to the store."""
    named = ", ".join(map(str, missing))
    message = (
        f"generation {generation.number}: rank {named} did not come to {shown(generation.store)} in {timeout_s:g} s"
    )
    if len(generation.members) == 2:
        return Broken(message, ELSEWHERE)
    is_alone = rank == generation.members[0] and len(missing) == len(generation.members) - 1
    return Broken(message, HERE if is_alone else UNKNOWN)


def _failed(rank: int, other: int, there: Here) -> OutOfReach | None:
    try:
        reach(rank, other, there.own)
    except OutOfReach as error:
        return error
    return None


def _told(rank: int, lost: Mapping[int, set[int]]) -> str:
    """By one that reaches all."""
    who, whom = next((who, min(whom)) for who, whom in lost.items() if whom)
    others = "" if rank == whom else f" and rank {rank}"
    return f"rank {who} cannot reach rank {whom}, to average with it{others}"


def who_goes(lost: Mapping[int, set[int]]) -> int | None:
    """Of members that could not reach others (whom, by who) the one that has most of the connections that fail, and
    of several the highest rank. None where all could."""
    failed = {frozenset((who, item)) for who, whom in lost.items() for item in whom}
    count = Counter(item for pair in failed for item in pair)
    return max(count, key=lambda item: (count[item], item), default=None)


def reach(rank: int, other: int, address: Address, attempts: int = UNKNOWN) -> None:
    """Returns when there is somebody. OutOfReach."""
    try:
        socket.create_connection(address, _REACH_S).close()
    except OSError as error:
        message = f"rank {rank} cannot reach rank {other} at {shown(address)}, to average with it: {error}"
        raise OutOfReach(message, attempts) from None


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def shown(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return host, int(port)
