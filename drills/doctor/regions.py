"""`ps-launch doctor --regions`: measures round trips between all hosts, and groups the hosts into regions."""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path

from rich.table import Table

from ...common.config.schema import Config
from ...common.config.sources import load_config
from ...common.errors import UnreachableError, UsageError, raise_first
from ...common.reporting.pictures.progress import Steps
from ...common.reporting.report import report_console
from ...common.wire.json_text import to_json
from ...launch.backends.base import Site
from ...launch.backends.ssh import SshBackend
from ...launch.hosts.connection import Unreachable
from ...launch.hosts.remote import hosts_of
from ...launch.plan.hosts import Host, check_addresses, load_hosts, place_servers, text_with_regions
from ...launch.plan.regions import MIN_HEIGHT_S, MIN_RATIO, Region, Trips, distances, find_regions, load_scipy

_NUM_CONNECTS = 7
_LIMIT_S = 2.5  # of a connect; the system sends a lost first packet again after one second
_AT_ONCE = 4  # pairs that a host measures at a time
_MAX_PAIRS = 5  # blocked pairs in a sentence


def examine_regions(
    path: str | None, hosts_path: str, num: int | None, writes: bool, sets: list[str], as_json: bool
) -> int:
    """Measure, print the regions, and with `writes` write them into the hosts file. Returns the exit code.

    Raises ParamServerError.
    """
    config = load_config(path, {"launch.hosts": hosts_path}, sets, os.environ, is_worker=False).config
    hosts = hosts_of(config)
    raise_first(
        (len(hosts) < 2, f"{hosts_path} names one host", "regions need two hosts or more"),
        (num is not None and num > len(hosts), f"--num-regions {num}: {hosts_path} names {len(hosts)} hosts",
         "a region has at least one host"),
    )  # fmt: skip
    check_addresses(hosts, hosts)
    load_scipy()
    with Steps() as steps:
        trips = asyncio.run(measure_trips(config, hosts, lambda part: steps.at(part, "measuring round trips")))
    upstream = place_servers(hosts, 1)[0].host
    names = [host.host for host in hosts]
    regions = find_regions(names, trips, upstream, num)
    texts = sentences(names, trips, regions, upstream)
    if as_json:
        texts.append(_in_file(hosts_path, hosts, regions, writes))
        seconds = [[0.0 if a == b else trips[a, b] for b in names] for a in names]
        groups = [{"name": region.name, **vars(region)} for region in regions]
        print(to_json({"hosts": names, "round_trips_s": seconds, "regions": groups, "sentences": texts}, indent=2))
        return 0
    console = report_console()
    console.print(matrix(trips, regions))
    for text in texts:
        console.print(text, highlight=False)
    console.print(_in_file(hosts_path, hosts, regions, writes), highlight=False)
    return 0


async def measure_trips(
    config: Config, hosts: Sequence[Host], show: Callable[[float], object] = lambda part: None
) -> dict[tuple[str, str], float]:
    """Returns the seconds of a round trip from each host to each other one, by (from, to). Raises ParamServerError.

    `show` gets the part (0..1) that is done.
    """
    backend = SshBackend(lambda *_: None, lambda *_: None, Site(config=config, hosts=tuple(hosts), folder=os.getcwd()))
    found: dict[tuple[str, str], float] = {}
    try:
        connections = await backend.connections()
        ports = await asyncio.gather(*(each.measure("listen", port=config.launch.port or 0) for each in connections))
        addresses = [f"{host.listen}:{port}" for host, port in zip(hosts, ports, strict=True)]

        async def ping(number: int, other: int, turn: asyncio.Semaphore) -> None:
            async with turn:
                connects = {"num": _NUM_CONNECTS, "limit_s": _LIMIT_S}
                trip = await connections[number].measure("ping", address=addresses[other], **connects)
            found[hosts[number].host, hosts[other].host] = trip if isinstance(trip, float) else math.inf
            show(len(found) / (num * (num - 1)))

        num = len(hosts)
        work = []
        for number in range(num):
            turn = asyncio.Semaphore(_AT_ONCE)
            # Each host begins with the host after it, so that not all begin with the same host.
            work += [ping(number, (number + step) % num, turn) for step in range(1, num)]
        await asyncio.gather(*work)
    except Unreachable as error:
        raise UnreachableError(f"cannot measure round trips: {error}", fix="check that host") from None
    finally:
        await backend.close()
    return found


def matrix(trips: Trips, regions: Sequence[Region]) -> Table:
    """Returns the round trips in milliseconds from each host (row) to each other one (column), region after region."""
    names = [host for region in regions for host in region.hosts]
    table = Table("", "ms from", "region", *map(str, range(1, len(names) + 1)), box=None)
    for region in regions:
        for host in region.hosts:
            cells = ["" if other == host else _ms(trips[host, other]) for other in names]
            table.add_row(str(names.index(host) + 1), host, region.name, *cells)
    return table


def sentences(hosts: Sequence[str], trips: Trips, regions: Sequence[Region], upstream: str) -> list[str]:
    """Returns the regions and relays that the round trips show, as sentences."""
    known = distances(hosts, trips)
    of = {host: region for region in regions for host in region.hosts}
    within = _span(known[pair] for pair in combinations(hosts, 2) if of[pair[0]] is of[pair[1]])
    between = _span(known[pair] for pair in combinations(hosts, 2) if of[pair[0]] is not of[pair[1]])
    spans = ", ".join(f"{span} ms {name}" for name, span in (("between regions", between), ("within", within)) if span)
    groups = " | ".join(", ".join(region.hosts) for region in regions)
    texts = [f"{len(regions)} region{'s' * (len(regions) > 1)}: {groups}" + f"; round trips: {spans}" * bool(spans)]
    blocked = [f"{a} and {b}" for a, b in combinations(hosts, 2) if math.isinf(known[a, b])]
    if blocked:
        others = f" and {len(blocked) - _MAX_PAIRS} more pairs" if len(blocked) > _MAX_PAIRS else ""
        texts.append(f"These hosts do not reach each other: {', '.join(blocked[:_MAX_PAIRS])}{others}.")
    if len(regions) == 1:
        gap = f"by a factor of {MIN_RATIO:g} or more, to {MIN_HEIGHT_S * 1e3:g} ms or more"
        advice = "relays would gain nothing. --num-regions N divides the hosts anyway."
        return [*texts, f"The round trips do not jump {gap}: {advice}"]
    relays = [region.relay for region in regions if region.relay and len(region.hosts) > 1]
    if relays:
        texts.append(f"The relays belong on {', '.join(relays)}.")
    if alone := [region.name for region in regions if len(region.hosts) == 1]:
        texts.append(f"A relay saves nothing in a region of one host: {', '.join(alone)}.")
    texts += [
        f"Region {region.name} has no host for a relay: all others of the region must reach it, and it must reach "
        f"{upstream}, where the server runs."
        for region in regions
        if region.relay is None and len(region.hosts) > 1
    ]
    latency = f"--border-latency {between.split()[-1]}ms " if between else ""
    texts.append(
        "Compare intervals at your links' bandwidth: ps-sim CONFIG -n WORKERS "
        f"--regions {len(regions)} {latency}--border-bandwidth 100mbit --upstream-every 0,8,32"
    )
    return texts


def _in_file(path: str, hosts: Sequence[Host], regions: Sequence[Region], writes: bool) -> str:
    """Returns a sentence about the regions in the hosts file. With `writes` it first writes them."""
    theirs: dict[str | None, list[str]] = {}
    for host in hosts:
        theirs.setdefault(host.region, []).append(host.host)
    none = theirs.pop(None, [])
    if not none and sorted(theirs.values()) == sorted(list(region.hosts) for region in regions):
        return f"{path} has these regions."
    if writes:
        write_regions(path, {host: region.name for region in regions for host in region.hosts})
        return f"{path}: the regions of {len(hosts)} hosts are written."
    if not theirs:
        return f"--write writes them into {path}."
    other = " | ".join(f"{', '.join(group)} ({name})" for name, group in theirs.items())
    lacking = f", and none for {', '.join(none)}" if none else ""
    return f"{path} has other regions: {other}{lacking}. --write replaces them."


def write_regions(path: str, names: Mapping[str, str]) -> None:
    """Write the region of each host into the hosts file. Raises UsageError."""
    text = ""
    found: tuple[Host, ...] = ()
    with tempfile.TemporaryDirectory() as folder, suppress(UsageError, KeyError):
        trial = Path(folder, "hosts.yaml")
        trial.write_text(text := text_with_regions(path, names), encoding="utf-8")
        found = load_hosts(str(trial))
    wanted = tuple(host.model_copy(update={"region": names[host.host]}) for host in load_hosts(path))
    if found != wanted:
        by_hand = ", ".join(f"{host}: {name}" for host, name in names.items())
        message = f"{path} is unchanged: --write cannot change a file of this form"
        raise UsageError(message, fix=f"write the regions by hand: {by_hand}")
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def _span(distances_s: Iterable[float]) -> str:
    """Returns the range of the finite distances, as milliseconds without the unit; empty if none is finite."""
    finite = [item for item in distances_s if math.isfinite(item)]
    if not finite:
        return ""
    low, high = _ms(min(finite)), _ms(max(finite))
    return low if low == high else f"{low} to {high}"


def _ms(trip_s: float) -> str:
    if math.isinf(trip_s):
        return "-"
    return f"{1e3 * trip_s:.{0 if trip_s >= 0.01 else 1 if trip_s >= 1e-4 else 2}f}"
