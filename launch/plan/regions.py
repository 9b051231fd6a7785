"""Regions: which a run has, which settings its relays and the server above get, and which hosts are close. Pure.

Server 0 is the server above. Its workers are the relays: servers 1, 2, ..., which serve the workers of a region each.
Worker numbers count through all regions, ranks from 0 in each region. `--mode` is the mode of the regions.

`ps-launch doctor` groups hosts into regions by the round trips between them, and chooses the host of each relay.
Complete linkage (scipy) merges the two groups whose farthest hosts are closest. The cut is at the largest ratio between
successive merge heights: inside a region hosts are close, and the next region is several times as far away.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from typing import Any

from ...common.config.schema import Config
from ...common.config.sources import Resolved, of_mode
from ...common.errors import UsageError, raise_first
from ...common.registry import MODES
from .hosts import Child, Host, place_workers
from .settings import LEAVES, SINGLE, is_flag, turned_off, value_of

# Settings of the server above only, and settings that have no effect in a relay.
_NOT_FOR_RELAYS = (*LEAVES, "server.web", "store.polyak")


def relays_of(resolved: Resolved, hosts: Sequence[Host], num_workers: int) -> dict[Child, range]:
    """Returns the relay of each region, and the numbers of its workers; none for a single region. Raises UsageError."""
    origins, num = resolved.origins, resolved.config.launch.regions
    sizes = Counter(dict.fromkeys((host.region for host in hosts if host.region), 0))
    without = [host.host for host in hosts if not host.region]
    raise_first(
        (not sizes and not num and is_flag(origins.get("upstream.every", "")),
         f"{origins.get('upstream.every')}: there are no regions", "--regions N, or region: NAME in hosts.yaml"),
        (sizes and without, f"hosts without a region, although others have one: {', '.join(without)}",
         "region: NAME for each host; ps-launch doctor --regions --write measures them"),
        (num and num_workers % num,
         f"{origins.get('launch.regions')}: {num_workers} workers cannot be divided equally among {num} regions",
         f"a number of workers that is a multiple of {num}"),
    )  # fmt: skip
    if num:
        sizes = Counter({str(rank): num_workers // num for rank in range(num)})
    elif sizes:
        sizes.update(str(host.region) for host in place_workers(hosts, num_workers))
    if len(sizes) < 2:
        return {}
    empty = next((name for name, size in sizes.items() if not size), None)
    problem = f"region {empty} has no worker: {num_workers} workers fill the regions before it"
    raise_first((empty, problem, f"-n {sum(host.slots for host in hosts)}, or fewer slots in hosts.yaml"))
    relays = (Child("server", rank, name) for rank, name in enumerate(sizes, 1))
    ends = accumulate(sizes.values())
    return {relay: range(end - sizes[relay.region], end) for relay, end in zip(relays, ends, strict=True)}


def mode_above(config: Config, mode: str) -> str:
    """Returns the mode of the run above for regions of this mode."""
    return config.upstream.mode if config.upstream.every else mode


def choices(config: Config, num_regions: int) -> dict[str, Any]:
    """Returns the fields of `Choices` about so many regions. Without `every` the run above has their mode."""
    mode = config.upstream.mode if num_regions and config.upstream.every else ""
    return {"regions": num_regions, "mode_above": mode, "kind_above": MODES.load(mode).kind if mode else None}


def check_together(resolved: Resolved, modes: Sequence[str], num_regions: int, *, spans_hosts: bool) -> None:
    """Raise UsageError for settings or modes that do not go together with these regions."""
    config, origins = resolved.config, resolved.origins
    every, name = config.upstream.every, config.launch.backend or "ssh"
    if tuple(modes) != (SINGLE,):
        above = (config.upstream.mode,) if every else ()
        resolved.check_options((*modes, *above), also="--set ")
    also, steps = f"together with {num_regions} regions", origins.get("policy.local_steps", "")
    raise_first(
        (spans_hosts and config.launch.regions is not None,
         f"{origins.get('launch.regions')}: these regions are on this machine, and backend {name} uses other machines",
         "leave it out; hosts have a region each, region: NAME"),
        (resolved.was_set("upstream.mode") and not every,
         f"{origins.get('upstream.mode')}: without --upstream-every K the run above has the mode of the regions",
         "--upstream-every K"),
        (every and is_flag(steps) and not any(
            "local_steps" in MODES.load(mode).Options.model_fields for mode in modes if mode != SINGLE
        ), f"{steps} has no effect {also}: the run above exchanges every {every} steps", "leave it out"),
    )  # fmt: skip


def settings_above(config: Config, mode: str, settings: Mapping[str, Any], num_regions: int) -> dict[str, Any]:
    """Returns the settings of the server above, from those of all servers."""
    every, policy, above = config.upstream.every, config.policy, mode_above(config, mode)
    found = {**of_mode(above, settings, [])[0], "run.mode": above}
    found |= {"policy.local_steps": every} if every else {}
    found |= {"policy.delayed_update": False} if policy.delayed_update else {}
    found |= {"policy.backup_workers": 0} if policy.option("backup_workers") else {}
    return found | settings_of_size(config, num_regions)


def settings_of_relays(config: Config, mode: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that all relays have, from those of all servers."""
    lacks = [key for key in _NOT_FOR_RELAYS if value_of(config, key) or key in settings]
    return {**of_mode(mode, settings, [])[0], **turned_off(config, lacks)}


def settings_of_size(config: Config, num_workers: int) -> dict[str, Any]:
    """Returns the settings that depend on the number of workers of a region, or of the run above."""
    least = {"policy.min_workers": num_workers} if config.policy.min_workers > num_workers else {}
    return {"run.workers": num_workers, **least}


def settings_of_relay(config: Config, relay: Child, above: str, num_workers: int) -> dict[str, Any]:
    """Returns the settings that one relay has. `above`: the address of the server above."""
    seat = {"upstream.server": above, "upstream.rank": relay.rank - 1, "upstream.region": relay.region}
    return seat | settings_of_size(config, num_workers)


# ---- hosts that are close to each other ----------------------------------------------------------

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
