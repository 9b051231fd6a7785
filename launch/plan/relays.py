"""Decides which regions a run has, and which settings its relays and the server above get. Pure.

Server 0 is the server above. Its workers are the relays: servers 1, 2, ..., which serve the workers of a region each.
Worker numbers count through all regions, ranks from 0 in each region. `--mode` is the mode of the regions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from ...common.config.schema import Config
from ...common.config.sources import Resolved, of_mode
from ...common.errors import raise_first
from ...common.registry import MODES
from .hosts import Host
from .placement import place_workers
from .process import Child
from .settings import LEAVES, is_flag, turned_off, value_of

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


def check_regions(resolved: Resolved, modes: Sequence[str], num_regions: int) -> None:
    """Raise UsageError for settings or modes that do not go together with these regions."""
    config, origins = resolved.config, resolved.origins
    every = config.upstream.every
    also, steps = f"together with {num_regions} regions", origins.get("policy.local_steps", "")
    raise_first(
        (resolved.was_set("upstream.mode") and not every,
         f"{origins.get('upstream.mode')}: without --upstream-every K the run above has the mode of the regions",
         "--upstream-every K"),
        (every and is_flag(steps) and not any(
            "local_steps" in MODES.load(mode).Options.model_fields for mode in modes
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
