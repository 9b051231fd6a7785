"""The data of a run as its workers describe it, compared among ranks."""

from __future__ import annotations

from collections.abc import Iterator

from ....common.errors import ParamServerError, Reason, refusal, same_batches
from ..effects import Effect, Log


class Data:
    """What workers say of their data with their first contributions."""

    def __init__(self) -> None:
        self._firsts: dict[tuple[int, int], int] = {}  # rank, by the version it began with and digest
        self._began: dict[int, tuple[int, int]] = {}  # version and digest of each rank's newest first contribution
        self.twins: dict[int, int] = {}  # by rank, until it is notified: another with the same first result
        self.num_samples: int | None = None  # of the data set, also before a snapshot; None: no worker has said it
        self._is_said = False

    def record(self, rank: int, version: int, digest: int) -> Iterator[Effect]:
        """Record a digest of the result of a worker's first contribution; 0: unknown. Warns once of equal ones."""
        before, newest = self._began.get(rank), (version, digest)
        if before is not None and self._firsts.get(before) == rank:
            del self._firsts[before]
        self._began[rank] = newest
        # Another rank whose first result, from the same weights, is the same.
        if digest and (other := self._firsts.setdefault(newest, rank)) != rank:
            self.twins |= {rank: other, other: rank}
            if not self._is_said:
                self._is_said = True
                yield Log("warning", "same_batches", same_batches(other, rank))

    def differs(self, rank: int, num_samples: int) -> ParamServerError | None:
        """Returns the refusal of a rank whose data set has another length than the run's. 0 samples: unknown."""
        if not num_samples or self.num_samples in (None, num_samples):
            self.num_samples = num_samples or self.num_samples
            return None
        return refusal(
            Reason.RUN_MISMATCH,
            f"the data set that rank {rank} gives to session.shard() has {num_samples:,} samples, and the run's has "
            f"{self.num_samples:,}: the ranks' positions in it would not fit",
            fix="give every worker the whole data set, the same as before a resume; or a DataLoader of its own instead "
            "of session.shard(); worker.accept_other_data=true (PS_WORKER__ACCEPT_OTHER_DATA=1) goes on with it",
        )
