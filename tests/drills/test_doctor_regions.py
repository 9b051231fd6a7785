"""`ps-launch doctor --regions`: its sentences and its matrix, and hosts files that it cannot change. As values."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest

from paramserver.common.errors import UsageError
from paramserver.common.reporting.report import report_console
from paramserver.drills.doctor.regions import matrix, sentences, write_regions
from paramserver.launch.plan.hosts import load_hosts
from paramserver.launch.plan.regions import find_regions
from paramserver.tests.launch import test_regions


def trips_of(*groups: str) -> dict[tuple[str, str], float]:
    return test_regions.trips_of(dict.fromkeys(groups, 0.3), far_ms=41.0)


def found_in(trips: dict[tuple[str, str], float], upstream: str = "a") -> list[str]:
    hosts = sorted({host for pair in trips for host in pair})
    return sentences(hosts, trips, find_regions(hosts, trips, upstream), upstream)


def test_regions_and_their_relays() -> None:
    trips = trips_of("ab", "c", "de")
    trips["a", "c"] = 0.088
    trips["d", "e"] = 0.00114
    assert found_in(trips) == [
        "3 regions: a, b | c | d, e; round trips: 41 to 88 ms between regions, 0.3 to 1.1 ms within",
        "The relays belong on a, d.",
        "A relay saves nothing in a region of one host: c.",
        "Compare intervals at your links' bandwidth: ps-sim CONFIG -n WORKERS "
        "--regions 3 --border-latency 88ms --border-bandwidth 100mbit --upstream-every 0,8,32",
    ]


def test_one_region() -> None:
    first, second = found_in(trips_of("abc"))
    assert first == "1 region: a, b, c; round trips: 0.3 ms within"
    assert second.endswith("relays would gain nothing. --num-regions N divides the hosts anyway.")


def test_pairs_that_do_not_reach_each_other() -> None:
    trips = trips_of("abc", "defg")
    trips |= {pair: math.inf for pair in trips if set(pair) <= set("abc") or ("d" in pair and set(pair) & set("efg"))}
    trips["a", "b"] = trips["c", "b"] = 0.0003
    texts = found_in(trips, "g")
    assert texts[1] == ("These hosts do not reach each other: a and c, d and e, d and f, d and g.")
    assert texts[3].startswith("A relay saves nothing in a region of one host: d.")
    trips = trips_of("abc", "defg")
    trips |= {pair: math.inf for pair in trips if pair[0] in "abc" and pair[1] in "defg"}
    trips |= {pair: math.inf for pair in trips if pair[1] in "abc" and pair[0] in "defg"}
    texts = found_in(trips, "g")
    assert texts[0] == "2 regions: a, b, c | d, e, f, g; round trips: 0.3 ms within"
    assert texts[1].endswith("a and d, a and e, a and f, a and g, b and d and 7 more pairs.")
    assert texts[2:-1] == [
        "The relays belong on d.",
        "Region a has no host for a relay: all others of the region must reach it, and it must reach g, where the "
        "server runs.",
    ]


def test_the_matrix_shows_hosts_region_by_region() -> None:
    trips = trips_of("ac", "bd")
    trips |= {("a", "b"): math.inf, ("d", "b"): 0.00004}
    out = io.StringIO()
    report_console(out).print(matrix(trips, find_regions("abcd", trips, "a")))
    assert [line.split() for line in out.getvalue().splitlines()] == [
        ["ms", "from", "region", "1", "2", "3", "4"],
        ["1", "a", "a", "0.3", "-", "41"],
        ["2", "c", "a", "0.3", "41", "41"],
        ["3", "b", "b", "41", "41", "0.3"],
        ["4", "d", "b", "41", "41", "0.04"],
    ]


@pytest.mark.parametrize(
    "text",
    [
        "hosts: [{host: a, region: &r eu}, {host: b, region: *r}]\n",  # the same text stands for both
        "defaults: {host: a, region: eu}\nhosts: [{slots: 2}, {host: b}]\n",
    ],
)
def test_a_file_of_an_unusual_form_stays_as_it_is(text: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match="is unchanged: --write cannot change a file of this form") as raised:
        write_regions(str(path), {"a": "a", "b": "b"})
    assert raised.value.fix == "write the regions by hand: a: a, b: b"
    assert path.read_text() == text and [host.region for host in load_hosts(str(path))] == ["eu", "eu"]
