"""What has come to which shard, until it has come to all. Pure."""

from __future__ import annotations

from .orders import Gathered


class Gather:
    """Reports by rank. Of each kind only a shard's newest about a rank is kept: a worker does one thing at a time."""

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._reports: dict[tuple[type, int], dict[int, Gathered]] = {}

    def add(self, shard: int, report: Gathered) -> list[Gathered]:
        """Everyone's reports, in the order of shards, when this one completes them; empty otherwise."""
        found = self._reports.setdefault((type(report), report.rank), {})
        found[shard] = report
        same = [found[index] for index in sorted(found) if _of(found[index]) == _of(report)]
        if len(same) < self._num_shards:
            return []
        del self._reports[type(report), report.rank]
        return same

    def forget(self, rank: int, incarnation: int) -> None:
        """The worker is gone, or begins again as another incarnation."""
        for (kind, of), found in list(self._reports.items()):
            if of == rank:
                for shard, report in list(found.items()):
                    if report.incarnation <= incarnation:
                        del found[shard]
                if not found:
                    del self._reports[kind, of]

    def missing(self, kind: type[Gathered], rank: int) -> list[int]:
        """Shards that have not reported where at least one has."""
        found = self._reports.get((kind, rank), {})
        return [shard for shard in range(self._num_shards) if shard not in found] if found else []


def _of(report: Gathered) -> tuple[int, int]:
    """What must be the same for two reports to be about one thing."""
    return report.incarnation, getattr(report, "step", 0)
