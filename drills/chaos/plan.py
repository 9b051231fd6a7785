"""Which fault when to whom: the same for the same seed. Pure.

    kill_worker       SIGKILL; the launcher starts it again
    kill_server       SIGKILL; it goes on from its newest snapshot
    freeze_worker     SIGSTOP for less or for more than the lease, then SIGCONT
    freeze_server     the same to the server; nobody may be let go because of it
    partition         one worker, or all, and the server do not hear each other, for less or more than the lease
    lose_answers      one worker is heard and hears nothing, and then its connections are reset
    reset             the connections of one worker are reset
    cut               they are reset in the middle of what the worker sends next
    slow              every piece of data takes a while longer, both ways, for everybody
    loss              some pieces wait as long as TCP takes to notice a lost packet
    drop              packets are lost (needs root, iptables and a network of its own)

Kinds come from a shuffled deck, deck after deck, so that a minute has all of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ...common.errors import UsageError, did_you_mean

KINDS = (
    "kill_worker", "kill_server", "freeze_worker", "freeze_server", "partition", "lose_answers",
    "reset", "cut", "slow", "loss", "drop",
)  # fmt: skip
_OF_ONE_WORKER = frozenset({"kill_worker", "freeze_worker", "lose_answers", "reset", "cut"})
_AT_ONCE = frozenset({"kill_worker", "kill_server", "reset", "cut"})
_LASTING = frozenset({"freeze_worker", "freeze_server", "partition"})  # against the lease
# Per deck: what a run must survive most often.
_PER_DECK = {"kill_worker": 2, "kill_server": 2, "freeze_worker": 2, "partition": 2}

_SHARE_OF_ALL = 0.25  # of the partitions: everybody's
_MEAN_GAP_LEASES = 0.8  # seconds between two faults, in leases: they overlap now and then


class Fault(NamedTuple):
    """`at_s` counts from the first snapshot; `rank` None is the server, or everybody; `for_s` 0: at once."""

    at_s: float
    kind: str
    rank: int | None = None
    for_s: float = 0.0

    def __str__(self) -> str:
        whom = f" worker {self.rank}" if self.rank is not None else ""
        return f"{self.kind}{whom}" + (f" for {self.for_s:.2f} s" if self.for_s else "")


def check_kinds(text: str | None) -> tuple[str, ...]:
    """The kinds of a comma list, all of them for None. Raises UsageError."""
    kinds = KINDS if text is None else tuple(word.strip() for word in text.split(","))
    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(f"flag --faults: there is no fault '{kind}'", fix=did_you_mean(kind, KINDS))
    return kinds


def make_plan(
    seed: int, *, seconds: float, num_workers: int, lease_s: float, kinds: Iterable[str] = KINDS
) -> list[Fault]:
    """Faults over `seconds`, in order. Equal arguments give equal plans."""
    chance = random.Random(seed)
    deck = _deal(chance, sorted(set(kinds)))
    plan: list[Fault] = []
    at_s = 0.0
    while True:
        at_s += chance.expovariate(1 / (_MEAN_GAP_LEASES * lease_s))
        if at_s >= seconds:
            return plan
        plan.append(_fault(chance, at_s, next(deck), num_workers, lease_s))


def _deal(chance: random.Random, kinds: list[str]) -> Iterator[str]:
    while True:
        deck = [kind for kind in kinds for _ in range(_PER_DECK.get(kind, 1))]
        chance.shuffle(deck)
        yield from deck


def _fault(chance: random.Random, at_s: float, kind: str, num_workers: int, lease_s: float) -> Fault:
    rank: int | None = chance.randrange(num_workers)
    if kind not in _OF_ONE_WORKER and (kind != "partition" or chance.random() < _SHARE_OF_ALL):
        rank = None
    if kind in _AT_ONCE:
        return Fault(at_s, kind, rank)
    if kind in _LASTING:  # clearly shorter or clearly longer: in between either may happen
        leases = chance.choice([chance.uniform(0.1, 0.6), chance.uniform(1.3, 2.0)])
    else:
        leases = chance.uniform(0.3, 0.8)
    return Fault(at_s, kind, rank, leases * lease_s)
