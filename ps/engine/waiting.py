"""Why each worker waits, as people are told: one sentence for each, made only when somebody asks."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.replication import Sequencer
from ..core.run import Run
from .peers import Peer


def reasons(run: Run, peers: Mapping[tuple[int, int], Peer], sequencer: Sequencer, now: float) -> dict[int, str]:
    """Of every worker here, by rank; empty for one that waits for nothing. `peers` by rank and incarnation."""
    by_policy = run.policy.waiting(now) if run.has_weights else {}
    busy = sorted(rank for rank, worker in run.roster.workers.items() if not worker.is_finished)
    found = {}
    for rank, worker in run.roster.workers.items():
        peer = peers.get((rank, worker.incarnation))
        if worker.is_finished:
            names = ", ".join(map(str, busy or run.absent(now)))
            found[rank] = f"rank {names} to {'finish' if busy else 'come back'}" if names else ""
        elif worker.is_away:
            found[rank] = "its connection"
        elif shard := sequencer.missing(rank) if peer is not None and peer.state == "waiting" else "":
            found[rank] = shard
        elif run.is_holding:
            found[rank] = "the first snapshot on all shards"
        elif not run.has_weights:
            bringer = run.bringer
            found[rank] = f"initial weights from rank {bringer.rank}" if bringer not in (None, worker) else ""
        else:
            found[rank] = by_policy.get(rank, "")
    return found
