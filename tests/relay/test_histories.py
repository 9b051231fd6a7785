"""ps-launch check: the history of the run above together with those of its relays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paramserver.common.reporting.regions import region_run
from paramserver.drills.check import Verdict, check
from paramserver.tests.cluster import Cluster
from paramserver.tests.drills.histories import Line, applied, encoded, joined, start
from paramserver.tests.relay.world import World, until_version


def verdict_of(above: list[Line], region: list[Line]) -> Verdict:
    return check({"region": encoded(*region), "above": encoded(*above)})


def tiers(*samples: int, of_region: tuple[int, ...]) -> tuple[list[Line], list[Line]]:
    """Histories in which rank 0 above has these contributions, and its region those."""
    found = []
    for run, counts in (("r", samples), (region_run("r", 0), of_region)):
        lines = [start("async", run=run), *joined(0)]
        for seq, count in enumerate(counts, 1):
            lines += applied(0, seq, seq, 0)
            lines[-3]["samples"] = count
        found.append(lines)
    return found[0], found[1]


def test_the_samples_above_are_those_of_a_version_of_the_region() -> None:
    assert verdict_of(*tiers(8, 4, of_region=(4, 4, 4))).is_good
    ahead = verdict_of(*tiers(8, of_region=(4, 4, 4)))
    assert ahead.is_good and ahead.tally.applied == 1
    (region,) = ahead.comparisons
    assert region.tally.applied == 3 and (region.num_samples, region.num_counted) == (12, 8)
    twice = verdict_of(*tiers(8, 8, of_region=(4, 4, 4)))
    message = "region:0: the run above counts 16 samples of this region, rank 0: no version has them, of 12"
    assert list(map(str, twice.problems)) == [message]
    assert not verdict_of(*tiers(6, of_region=(4, 4, 4))).is_good


def test_what_was_dropped_above_was_contributed_all_the_same() -> None:
    above, region = tiers(8, of_region=(4, 4, 4))
    dropped = {**applied(0, 2, 2, 0)[0], "outcome": "dropped", "samples": 4}
    assert verdict_of([*above, dropped], region).is_good


def test_samples_of_lines_that_a_killed_server_has_not_written_are_not_compared() -> None:
    above, region = tiers(8, 8, of_region=(4, 4, 4))
    region += [start("async", run=region[0]["run"], incarnation=2, version=4, seqs={"0": 4})]
    verdict = verdict_of(above, region)
    assert verdict.is_good and verdict.comparisons[0].num_counted is None


def test_a_second_server_that_is_no_relay_of_the_first_is_a_problem() -> None:
    above, region = tiers(8, of_region=(8,))
    region[0]["run"] = "another"
    (problem,) = verdict_of(above, region).problems
    assert str(problem) == "above:1: a second server's history, of no region of the first, region"


@pytest.mark.slow
@pytest.mark.parametrize("above", ["sync", "localsgd"])
def test_real_histories_of_both_tiers(cluster: Cluster, above: str) -> None:
    """A relay is killed, and its new process goes on in the same file."""
    world = World(cluster, above)
    files = [f"relay{rank}.jsonl" for rank in range(2)]
    workers = world.start("--history", "relay{rank}.jsonl", delay_s=0.15)
    until_version(world.relays[1], 6)
    world.relays[1].kill()
    world.relay(1, "--history", files[1])
    world.wait(workers)
    done = cluster.command("launch", "check", "above.jsonl", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    line = "region relay1.jsonl: 48 applied, 1 restarts of the relay; the run above counts 48 of its 48 samples"
    assert line in done.stdout
    assert "every contribution was applied once, in the run above and in its regions" in done.stdout
    alone = cluster.command("launch", "check", files[0])
    assert alone.returncode == 0, alone.stdout + alone.stderr
    path = Path(cluster.folder / files[0])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "samples": 5 if "samples" in line else 0}) + "\n" for line in lines))
    done = cluster.command("launch", "check", "above.jsonl", *files)
    assert done.returncode == 1 and "samples of this region, rank 0: no version has them" in done.stdout
