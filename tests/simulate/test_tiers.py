"""ps-sim --regions: two tiers with links of known times, and beside a real run of three network namespaces."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest

from paramserver.benchmarks.rig.links import check_links
from paramserver.common.errors import UsageError
from paramserver.simulate.plan import Flags, resolve, worlds
from paramserver.simulate.regions import tiers
from paramserver.simulate.results.summary import metrics, summary
from paramserver.simulate.run.simulation import Simulation

STEPS, COMPUTE_S, BYTES = 32, 0.1, 1_000_000  # of the model; a border of 8 Mbit/s carries it in 1 s
MEGABYTES, BORDER = 1, ("8mbit", "100ms")


def simulated(
    *sets: str, mode: str = "sync", workers: int = 6, speeds: str = "1", regions: int = 2, upstream_every: str = "0",
    border: tuple[str, str] = BORDER,
) -> dict[str, Simulation]:  # fmt: skip
    machines = Flags(MEGABYTES, jitter=0.0, speeds=speeds, fold="0ms", step="0ms")
    configs = resolve(None, mode, workers, {"run.steps": STEPS}, list(sets), {})
    found = {}
    for config, world in tiers(worlds(configs, machines), regions, upstream_every, border, MEGABYTES):
        found[world.label] = Simulation(config, world)
        found[world.label].go()
    return found


def test_regions_that_wait_take_the_time_of_one_mean_over_the_border() -> None:
    found = simulated()
    assert list(found) == ["sync, flat", "sync, 2 regions, sync"]
    flat, regions = found.values()
    # The weights that a worker starts from cross the border too; the last reply carries the final weights.
    assert regions.now == pytest.approx(1.05 + STEPS * (COMPUTE_S + 2.1), rel=1e-3)
    assert flat.now > 2.5 * regions.now
    bytes_of = {name: sum(item.num_bytes for item in summary(run).workers) for name, run in found.items()}
    assert bytes_of["sync, 2 regions, sync"] == pytest.approx(bytes_of["sync, flat"] / 3, rel=0.01)
    assert metrics(regions)["steps/s"] == pytest.approx(6 * STEPS / regions.now, rel=0.05)


@pytest.mark.parametrize(("every", "exchanges_s"), [(4, 8 * 2.1), (32, 2.1)])
def test_regions_that_train_on_take_the_longer_of_training_and_exchange(every: int, exchanges_s: float) -> None:
    regions = simulated(upstream_every=str(every))[f"sync, 2 regions, diloco {every}"]
    assert regions.now == pytest.approx(1.05 + every * COMPUTE_S + exchanges_s, rel=1e-3)
    free = simulated(upstream_every=str(every), border=("none", "0ms"))
    flat, regions = free.values()
    assert regions.now == pytest.approx(flat.now, rel=0.05)
    assert metrics(regions)["of ideal"] > 0.95


def test_codecs_of_the_border_and_unequal_regions() -> None:
    q4 = ("upstream.codec=q4", "upstream.reply_codec=q4")
    raw, coded = (simulated(*sets, upstream_every="4")["sync, 2 regions, diloco 4"] for sets in ((), q4))
    sent = [sum(item.bytes_sent for item in summary(run).workers) for run in (raw, coded)]
    assert sent[0] / sent[1] > 6
    # The first three ranks are region 0, and twice as fast.
    runs = simulated(mode="ssp", upstream_every="8", speeds="2,2,2,1,1,1", border=("none", "0ms"))
    above = runs["ssp, 2 regions, diloco 8"]
    fast, slow = above.world.recorded
    assert fast[0][0] == pytest.approx(8 * COMPUTE_S / 2, rel=0.1) and slow[0][0] == pytest.approx(
        8 * COMPUTE_S, rel=0.1
    )


@pytest.mark.parametrize(
    ("mode", "flags", "words"),
    [
        ("sync", {"regions": 4}, "6 workers cannot be divided equally among 4 regions"),
        ("async", {}, "mode async, which has no rounds: the run above would take the mean gradient of each round"),
        ("sync", {"upstream_every": "x"}, "flag --upstream-every: 'x' is not a number at least 0"),
    ],
)
def test_what_cannot_be_simulated(mode: str, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        simulated(mode=mode, **flags)
    with pytest.raises(UsageError, match="mode sync: it would have to exchange weights every 8 steps"):
        simulated("upstream.mode=sync", upstream_every="8")


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_what_is_foreseen_is_what_comes_of_it_on_three_hosts() -> None:
    """Within a quarter, as of other modes. Each step sleeps, so that computing takes a known time on a busy machine.

    It is the tutorial of docs/regions.md: regions carry a part of the bytes of a flat run, and the namespaces go.
    """
    try:
        check_links()
    except UsageError as error:
        pytest.skip(str(error))
    rate, steps, every = 40, 32, 8
    tasks = ["task.args={hidden: 4096}", "slowdown.base_s=0.2"]
    flags = ["--rate", str(rate), "--latency", "40", "--workers", "2", "--steps", str(steps), "--every", str(every)]
    argv = [sys.executable, "-m", "paramserver.benchmarks.regions", *flags, *(f"--set={item}" for item in tasks)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"(?m)^(\S.+?) {2,}.* 1/(\S+) +([\d.]+) ", done.stdout)
    parts = {name: float(part) for name, part, _ in rows}
    assert 1.8 <= parts["regions, sync"] <= 2.2 and parts[f"regions, diloco {every} q4"] > 8, done.stdout
    left = subprocess.run(("ip", "netns", "list"), capture_output=True, text=True, check=True).stdout
    named = re.findall(r"ip netns exec (\w+)", done.stdout)
    assert named and not any(name in left for name in named)
    measured = {name: float(wall_s) for name, _, wall_s in rows}
    foreseen = {}
    for sets in ((), ("upstream.codec=q4", "upstream.reply_codec=q4")):
        border = f"{rate}mbit", "40ms"
        configs = resolve(None, "sync", 4, {"run.steps": steps, "task.name": "digits"}, [tasks[0], *sets], {})
        for config, world in tiers(worlds(configs, Flags(compute="220ms")), 2, f"0,{every}", border, None):
            simulation = Simulation(config, world)
            simulation.go()
            foreseen[world.label, bool(sets)] = summary(simulation).wall_s
    pairs = {
        "flat, sync": ("sync, flat", False), "regions, sync": ("sync, 2 regions, sync", False),
        f"regions, diloco {every} q4": (f"sync, 2 regions, diloco {every}", True),
    }  # fmt: skip
    errors = {name: foreseen[label] / measured[name] - 1 for name, label in pairs.items()}
    print(done.stdout, foreseen, errors, f"load {os.getloadavg()[0]:.1f}")
    assert {name: error for name, error in errors.items() if abs(error) > 0.25} == {}
