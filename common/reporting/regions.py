"""Names the runs of regions."""

from __future__ import annotations

import hashlib


def region_run(run: str, rank: int) -> str:
    """Returns the name of a region's run. `run`: that of the run above, where the region's relay has this rank."""
    return hashlib.sha256(f"{run}/{rank}".encode()).hexdigest()[:12]
