"""Regions: which hosts are close to each other, and where the relay of each group runs. As values."""

from __future__ import annotations

import math
import random
import sys
from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.common.errors import UsageError
from paramserver.launch.plan import regions
from paramserver.launch.plan.regions import Region, Trips, distances, find_regions

NUM_WORLDS = 1_000
NUM_HOSTS = 30
HOSTS = [f"h{number:02}" for number in range(NUM_HOSTS)]


def trips_of(spans_ms: dict[str, float], far_ms: float) -> dict[tuple[str, str], float]:
    """Round trips of planted regions: each is named by its hosts' letters, and its hosts are so far apart."""
    found = {}
    for a, b in permutations("".join(spans_ms), 2):
        within = [span_ms for group, span_ms in spans_ms.items() if a in group and b in group]
        found[a, b] = (within[0] if within else far_ms) / 1e3
    return found


def planted_world(seed: int) -> tuple[Trips, set[frozenset[str]]]:
    """30 hosts in 2 to 5 regions of at least 3: round trips with 20 % noise, 5 % of the pairs blocked."""
    chance = random.Random(seed)
    num = chance.randint(2, 5)
    of = [*(3 * list(range(num))), *(chance.randrange(num) for _ in range(NUM_HOSTS - 3 * num))]
    chance.shuffle(of)
    inside = [chance.uniform(0.2e-3, 1.2e-3) for _ in range(num)]
    between = {pair: chance.uniform(10e-3, 90e-3) for pair in combinations(range(num), 2)}
    trips: dict[tuple[str, str], float] = {}
    for a, b in combinations(range(NUM_HOSTS), 2):
        trip_s = inside[of[a]] if of[a] == of[b] else between[tuple(sorted((of[a], of[b])))]  # type: ignore[index]
        is_blocked = chance.random() < 0.05
        for pair in ((a, b), (b, a)):
            measured_s = trip_s * chance.uniform(0.8, 1.2)
            trips[HOSTS[pair[0]], HOSTS[pair[1]]] = math.inf if is_blocked else measured_s
    groups = {
        frozenset(host for host, label in zip(HOSTS, of, strict=True) if label == number) for number in range(num)
    }
    return trips, groups


def test_planted_regions_are_found() -> None:
    wrong = []
    for seed in range(NUM_WORLDS):
        trips, planted = planted_world(seed)
        if {frozenset(region.hosts) for region in find_regions(HOSTS, trips, HOSTS[0])} != planted:
            wrong.append(seed)
    assert len(wrong) <= NUM_WORLDS // 1_000, wrong


@given(st.integers(0, 10**9), st.randoms(use_true_random=False))
def test_the_order_of_the_hosts_does_not_matter(seed: int, chance: random.Random) -> None:
    trips, _ = planted_world(seed)
    shuffled = chance.sample(HOSTS, NUM_HOSTS)
    first, second = (
        {(frozenset(region.hosts), region.relay) for region in find_regions(hosts, trips, "h00")}
        for hosts in (HOSTS, shuffled)
    )
    assert first == second


@given(st.integers(0, 10**9), st.integers(1, 5))
def test_a_given_number_of_regions_is_kept(seed: int, num: int) -> None:
    trips, planted = planted_world(seed)
    found = find_regions(HOSTS, trips, "h00", num)
    assert len(found) == num and sorted(host for region in found for host in region.hosts) == HOSTS
    if num == len(planted):
        assert {frozenset(region.hosts) for region in found} == planted


@given(st.integers(0, 10**9))
def test_a_relay_is_reached_by_its_region_and_reaches_the_upstream_host(seed: int) -> None:
    trips, _ = planted_world(seed)
    known = distances(HOSTS, trips)
    for region in find_regions(HOSTS, trips, "h00"):
        able = [
            host
            for host in region.hosts
            if all(math.isfinite(trips[other, host]) for other in region.hosts if other != host)
            and (host == "h00" or math.isfinite(trips[host, "h00"]))
        ]
        sums = {host: sum(known[host, other] for other in region.hosts if other != host) for host in able}
        assert region.relay == min(sums, key=lambda host: (sums[host], host), default=None)


def groups_of(found: list[Region]) -> list[str]:
    return ["".join(region.hosts) for region in found]


@pytest.mark.parametrize(
    ("spans_ms", "far_ms", "expected"),
    [
        ({"abc": 0.5, "de": 0.5}, 40.0, ["abc", "de"]),
        ({"abc": 0.5, "d": 0.0}, 40.0, ["abc", "d"]),
        ({"abc": 0.1, "de": 0.1}, 1.9, ["abcde"]),  # far apart, but below 2 ms
        ({"abc": 1.0, "de": 1.0}, 2.9, ["abcde"]),  # less than three times
        ({"abc": 1.0, "de": 1.0}, 3.1, ["abc", "de"]),
        ({"ab": 40.0}, 40.0, ["ab"]),  # no other height to compare with
    ],
)
def test_where_a_region_ends(spans_ms: dict[str, float], far_ms: float, expected: list[str]) -> None:
    assert groups_of(find_regions("".join(spans_ms), trips_of(spans_ms, far_ms), "a")) == expected


def test_a_pair_that_is_blocked_does_not_split_a_region_and_joins_no_two() -> None:
    trips = trips_of({"abc": 0.5, "def": 0.5}, 40.0)
    trips |= dict.fromkeys([("a", "b"), ("b", "a"), ("a", "d"), ("d", "a")], math.inf)
    found = find_regions("abcdef", trips, "a")
    assert groups_of(found) == ["abc", "def"]
    assert found[0].relay == "c", "the only host that both others reach"


def test_hosts_that_nothing_connects_are_regions_of_their_own() -> None:
    trips = {pair: trip_s for pair, trip_s in trips_of({"abc": 0.5, "de": 0.5}, 40.0).items() if "f" not in pair}
    found = find_regions("abcdef", trips, "a")
    assert groups_of(found) == ["abc", "de", "f"]
    assert [region.relay for region in found] == ["a", "d", None], "f does not reach the upstream host"
    alone = {pair: trip_s for pair, trip_s in trips.items() if len({*pair} & set("abc")) != 1}
    assert groups_of(find_regions("abcde", alone, "a")) == ["abc", "de"]


def test_one_open_direction_is_a_distance_and_the_longer_of_two_counts() -> None:
    trips = {("a", "b"): 0.001, ("b", "a"): 0.003, ("a", "c"): 0.04}
    assert distances("abc", trips) == {
        ("a", "b"): 0.003, ("b", "a"): 0.003, ("a", "c"): 0.04, ("c", "a"): 0.04, ("b", "c"): math.inf,
        ("c", "b"): math.inf,
    }  # fmt: skip


def test_the_relay_is_the_medoid_and_of_equals_the_lowest_name() -> None:
    trips = trips_of({"abc": 0.5, "de": 0.5}, 40.0)
    assert [region.relay for region in find_regions("cbaed", trips, "e")] == ["a", "d"]
    trips |= {("a", "b"): 0.0009, ("a", "c"): 0.0009}
    assert find_regions("abcde", trips, "e")[0].relay == "b", "b and c are equal, a is farther away"
    trips["b", "e"] = math.inf
    assert find_regions("abcde", trips, "e")[0].relay == "c", "b does not reach the upstream host"
    trips["a", "c"] = math.inf
    assert find_regions("abcde", trips, "e")[0].relay == "a", "a does not reach c"


def test_without_scipy_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.cluster", None)
    with pytest.raises(UsageError, match="needs scipy") as raised:
        regions.load_scipy()
    assert raised.value.fix == "pip install 'paramserver[regions]'"
