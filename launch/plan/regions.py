"""Groups hosts into regions by the round trips between them, and chooses the host of each region's relay. Pure.

Complete linkage (scipy) merges the two groups whose farthest hosts are closest. The cut is at the largest ratio between
successive merge heights: inside a region hosts are close, and the next region is several times as far away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from ...common.errors import UsageError

Trips = Mapping[tuple[str, str], float]  # seconds of a round trip, by (from, to); infinity: not reached

MIN_RATIO = 3.0  # between two successive merge heights
MIN_HEIGHT_S = 0.002  # a region is at least so far from the next
_NEVER_S = 1e9  # stands for infinity, which scipy does not take


@dataclass(frozen=True)
class Region:
    """A group of hosts that are close to each other. `relay`: the host of its relay; None where no host qualifies."""

    hosts: tuple[str, ...]
    relay: str | None

    @property
    def name(self) -> str:
        """The relay's host, so that the hosts file tells where the relay runs."""
        return self.relay or self.hosts[0]


def find_regions(hosts: Sequence[str], trips: Trips, upstream: str, num: int | None = None) -> list[Region]:
    """Returns the regions in the order of their first hosts. Raises UsageError.

    `upstream`: the host of the server above the relays. `num`: the number of regions, at most one for each host; None:
    as many as the round trips show.
    """
    known = distances(hosts, trips)
    groups: dict[int, list[str]] = {}
    # Distances of regions are nearly an ultrametric: d(a, b) <= max(d(a, c), d(c, b)) for each host c. The least of
    # these bounds replaces an infinite distance. A blocked pair therefore does not split a region whose other hosts
    # connect it, and does not join two regions, because every detour between them crosses the border. Without a detour
    # over one host the distance stays infinite.
    full = dict(known)
    for a, b in known:
        if math.isinf(known[a, b]):
            detours = (max(known[a, c], known[c, b]) for c in hosts if c not in (a, b))
            full[a, b] = min(detours, default=math.inf)
    hierarchy, labels = load_scipy(), [1]
    if len(hosts) > 1:
        tree = hierarchy.linkage([min(full[pair], _NEVER_S) for pair in combinations(hosts, 2)], method="complete")
        if num is not None:
            labels = hierarchy.fcluster(tree, num, criterion="maxclust").tolist()
        else:
            height_s = threshold_s([height for _, _, height, _ in tree.tolist() if height < _NEVER_S])
            labels = hierarchy.fcluster(tree, height_s, criterion="distance").tolist()
    for host, label in zip(hosts, labels, strict=True):
        groups.setdefault(label, []).append(host)
    return [Region(tuple(group), _relay(group, upstream, trips, known)) for group in groups.values()]


def load_scipy() -> Any:
    """Returns scipy's module of hierarchical clustering. Raises UsageError where scipy is missing."""
    try:
        from scipy.cluster import hierarchy
    except ImportError:
        raise UsageError(
            "grouping hosts into regions needs scipy, which is not installed", fix="pip install 'paramserver[regions]'"
        ) from None
    return hierarchy


def distances(hosts: Sequence[str], trips: Trips) -> dict[tuple[str, str], float]:
    """Returns the distance of each pair, in both orders: the longer of its two round trips.

    Where only one direction is open, that one counts. Where none is, the distance is infinite.
    """
    found = {}
    for a, b in combinations(hosts, 2):
        both = [trips.get(pair, math.inf) for pair in ((a, b), (b, a))]
        found[a, b] = found[b, a] = max(filter(math.isfinite, both), default=math.inf)
    return found


def threshold_s(heights: Sequence[float]) -> float:
    """Returns the midpoint of the largest ratio between successive merge heights; without a large ratio a height above
    all of them."""
    gaps = [
        (high / max(low, 1e-9), (low + high) / 2)
        for low, high in pairwise(heights)
        if high >= MIN_RATIO * low and high >= MIN_HEIGHT_S
    ]
    return max(gaps, default=(0.0, _NEVER_S / 2))[1]


def _relay(group: Sequence[str], upstream: str, trips: Trips, known: Trips) -> str | None:
    """Returns the medoid of the hosts that all others of the group reach and that reach `upstream`."""

    def is_able(host: str) -> bool:
        wanted = [(other, host) for other in group] + [(host, upstream)]
        return all(a == b or math.isfinite(trips.get((a, b), math.inf)) for a, b in wanted)

    def cost(host: str) -> tuple[float, str]:
        return sum(known[host, other] for other in group if other != host), host

    return min(filter(is_able, group), key=cost, default=None)
