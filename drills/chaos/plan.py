"""Plans the faults of a drill: kind, time and target. The same seed gives the same plan. Pure.

    kill_worker       SIGKILL; the launcher starts it again
    kill_server       SIGKILL; it restarts from its newest snapshot
    freeze_worker     SIGSTOP for less or for more than the lease, then SIGCONT
    freeze_server     the same for the server, which must not release a worker because of it
    partition         no data passes between the server and one worker, or all, for less or more than the lease
    lose_replies      the server receives from one worker, but its replies are lost; then a reset
    reset             the connections of one worker are reset
    cut               a reset in the middle of the next bytes from the worker
    slow              data is delayed in both directions, for all workers
    loss              some data is delayed by the retransmission timeout of TCP
    drop              packets are lost (needs root, iptables and a network namespace)

With several shards, server faults hit the coordinator, and a reset may hit only the connections to one shard. There
are also:

    kill_shard        SIGKILL of another shard; all shards go back to the newest common snapshot
    freeze_shard      SIGSTOP of a shard for less or for more than the lease, then SIGCONT
    reset_link        a shard's connection to the coordinator is reset; missed messages are sent again
    part_link         the same, without a reconnection for less or more than the lease
    full_disk         a shard cannot write its snapshots for a while

The plan shuffles all kinds again and again, so that each minute has all of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

from ...common.errors import UsageError, did_you_mean
from ...launch.plan.hosts import Child

KINDS = (
    "kill_worker", "kill_server", "freeze_worker", "freeze_server", "partition", "lose_replies",
    "reset", "cut", "slow", "loss", "drop",
)  # fmt: skip
OF_SHARDS = ("kill_shard", "freeze_shard", "reset_link", "part_link", "full_disk")  # where there are several
ALL_KINDS = (*KINDS, *OF_SHARDS)
_OF_ONE_WORKER = frozenset({"kill_worker", "freeze_worker", "lose_replies", "reset", "cut"})
_AT_ONCE = frozenset({"kill_worker", "kill_server", "reset", "cut", "kill_shard", "reset_link"})
_LASTING = frozenset({"freeze_worker", "freeze_server", "partition", "freeze_shard", "part_link"})  # in leases
# How often each shuffle contains a kind, where not once: a run must survive these kinds most often.
_PER_DECK = {"kill_worker": 2, "kill_server": 2, "freeze_worker": 2, "partition": 2, "kill_shard": 2}

_SHARE_OF_ALL = 0.25  # share of the partitions that affect all workers
_MEAN_GAP_LEASES = 0.8  # time between two faults, in leases; faults sometimes overlap


class Fault(NamedTuple):
    """One fault. `at_s`: since the first snapshot. `rank`: the worker; None: the server, or all workers. `for_s`: its
    duration, 0 for a momentary fault. `shard`: the shard that it hits, or whose connections it hits."""

    at_s: float
    kind: str
    rank: int | None = None
    for_s: float = 0.0
    shard: int | None = None

    @property
    def worker(self) -> Child | None:
        """The worker that the fault hits; None: the server, or all workers."""
        return Child("worker", self.rank) if self.rank is not None else None

    @property
    def child(self) -> Child:
        """The process that the fault hits."""
        return self.worker or Child("server", self.shard or 0)

    def __str__(self) -> str:
        whom = f" worker {self.rank}" if self.rank is not None else ""
        whom += f" shard {self.shard}" if self.shard is not None else ""
        return f"{self.kind}{whom}" + (f" for {self.for_s:.2f} s" if self.for_s else "")


def check_kinds(text: str | None, num_shards: int = 1) -> tuple[str, ...]:
    """Returns the kinds of a comma list, all possible ones for None. Raises UsageError."""
    possible = ALL_KINDS if num_shards > 1 else KINDS
    kinds = possible if text is None else tuple(word.strip() for word in text.split(","))
    for kind in kinds:
        if kind not in ALL_KINDS:
            raise UsageError(f"flag --faults: there is no fault '{kind}'", fix=did_you_mean(kind, ALL_KINDS))
        if kind not in possible:
            raise UsageError(f"flag --faults: {kind} needs several shards", fix="say how many with --shards")
    return kinds


def make_plan(
    seed: int, *, seconds: float, num_workers: int, lease_s: float, kinds: Iterable[str] = KINDS, num_shards: int = 1
) -> list[Fault]:
    """Returns faults over `seconds`, in order. Equal arguments give equal plans."""
    chance = random.Random(seed)
    deck: list[str] = []
    plan: list[Fault] = []
    at_s = 0.0
    while (at_s := at_s + chance.expovariate(1 / (_MEAN_GAP_LEASES * lease_s))) < seconds:
        if not deck:
            deck = [kind for kind in sorted(set(kinds)) for _ in range(_PER_DECK.get(kind, 1))]
            chance.shuffle(deck)
        kind, rank, leases = deck.pop(0), chance.randrange(num_workers), 0.0
        is_of_one = kind in _OF_ONE_WORKER or (kind == "partition" and chance.random() >= _SHARE_OF_ALL)
        if kind in _LASTING:  # clearly shorter or longer than the lease, because near the lease the outcome is random
            leases = chance.choice([chance.uniform(0.1, 0.6), chance.uniform(1.3, 2.0)])
        elif kind not in _AT_ONCE:
            leases = chance.uniform(0.3, 0.8)
        shard: int | None = None
        if kind in OF_SHARDS:
            shard = chance.randrange(1, num_shards)
        elif kind == "reset" and num_shards > 1:
            shard = chance.choice([None, *range(num_shards)])
        plan.append(Fault(at_s, kind, rank if is_of_one else None, leases * lease_s, shard))
    return plan
