"""Regions: which relays start, with which settings, and what happens when one is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from paramserver.common.config.sources import Resolved
from paramserver.common.errors import UsageError
from paramserver.common.reporting.summary import Summary
from paramserver.launch.plan.hosts import SERVER, Child, place_processes
from paramserver.launch.plan.runs import Machine, Plan, Request, plan_runs
from paramserver.tests.launch.plans import hosts_of, resolve, settings_of

HOSTS = """hosts:
  - {host: a, region: eu, slots: 1}
  - {host: b, region: b, slots: 2}
  - {host: c, region: eu, slots: 1, server: true}
  - {host: d, region: us, slots: 1}
  - {host: e, region: us}
"""
DEADLINE_S = 300.0


def plans_of(resolved: Resolved, *modes: str, hosts: Any = (), exists: Any = lambda path: False) -> list[Plan]:
    config = resolved.config
    places = place_processes(hosts, config.run.workers or 0, 1, colocate=False, folder=".")
    machine = Machine(python="python", spans_hosts=bool(hosts), places=places, hosts=hosts, exists=exists)
    return plan_runs(resolved, Request(modes=modes or (config.run.mode,)), machine)


def test_two_regions_on_this_machine() -> None:
    (plan,) = plans_of(
        resolve(
            "store.polyak=0.9", "checkpoint.every_s=9", launch__regions=2, upstream__every=8,
            output__save="w.safetensors", output__history="h.jsonl", checkpoint__dir="kept",
            server__web="127.0.0.1:0", policy__min_workers=3,
        )
    )  # fmt: skip
    server, *others = plan.processes("h:1")
    assert [str(spec.child) for spec in others] == ["relay 0", "relay 1", *(f"worker {rank}" for rank in range(4))]
    above = settings_of(server.argv)
    assert (above.run.mode, above.run.workers, above.policy.option("local_steps")) == ("diloco", 2, 8)
    assert (above.output.save, above.checkpoint.dir, above.policy.min_workers) == ("w.safetensors", "kept", 2)
    for rank, spec in enumerate(others[:2]):
        relay = settings_of(spec.argv)
        assert (relay.upstream.server, relay.upstream.rank, relay.upstream.every) == ("h:1", rank, 8)
        assert (relay.run.mode, relay.run.workers, relay.server.listen) == ("sync", 2, "127.0.0.1:0")
        lacks = [relay.output.save, relay.checkpoint.dir, relay.checkpoint.every_s]
        assert [*lacks, relay.server.web, relay.store.polyak] == [None] * 5
        assert (spec.leaves, relay.output.history) == ((f"h-relay-{rank}.jsonl",), f"h-relay-{rank}.jsonl")
        assert not relay.output.store
        assert (relay.policy.option("local_steps"), relay.policy.min_workers) == (None, 2)
    assert [spec.argv[-2:] for spec in others[2:]] == [("--rank", rank) for rank in ("0", "1", "0", "1")]
    assert {settings_of(spec.argv).run.workers for spec in others[2:]} == {2}
    assert [settings_of(spec.argv).output.history for spec in others[4:]] == ["h-relay-1.jsonl"] * 2
    assert [plan.server_of(Child("worker", rank)).rank for rank in range(4)] == [1, 1, 2, 2]
    assert plan.server_of(Child("server", 2)) == SERVER
    assert [str(plan.worker_of(server, 1)) for server in (SERVER, *plan.workers_of)] == [
        "relay 1",
        "worker 1",
        "worker 3",
    ]
    assert plan.headline().startswith(
        "sync in 2 regions, diloco above every 8 steps: a server, 2 relays and 4 workers,"
    )


def test_scripts_have_their_rank_in_the_region_and_trainers_the_one_of_all() -> None:
    (plan,) = plans_of(resolve("launch.torch_variables=true", launch__regions=2, launch__script="t.py"))
    env = plan.workers("h:1")[3].env
    assert (env["PS_WORKER__RANK"], env["PS_RUN__WORKERS"], env["RANK"], env["WORLD_SIZE"]) == ("1", "2", "3", "4")


def test_regions_of_hosts(tmp_path: Path) -> None:
    """Region b has its relay on the host of its name, the others on their first host. Workers fill region by region."""
    (plan,) = plans_of(resolve(run__workers=5), hosts=hosts_of(tmp_path, HOSTS))
    host_of = {str(spec.child): spec.host for spec in plan.processes("h:1")}
    assert host_of == {
        "server": "c", "relay eu": "a", "relay b": "b", "relay us": "d",
        "worker 0": "a", "worker 1": "c", "worker 2": "b", "worker 3": "b", "worker 4": "d",
    }  # fmt: skip
    assert [settings_of(spec.argv).run.workers for spec in plan.shards("h:1")] == [2, 2, 1]
    assert [settings_of(spec.argv).server.listen for spec in plan.shards("h:1")] == ["a:0", "b:0", "d:0"]
    named = hosts_of(tmp_path, "hosts:\n  - {host: a, region: b}\n  - {host: b, region: b}\n  - {host: c, region: c}\n")
    (plan,) = plans_of(resolve(run__workers=3), hosts=named)
    assert plan.hosts()[Child("server", 1)] == "b"


def test_one_region_is_a_flat_run(tmp_path: Path) -> None:
    hosts = hosts_of(tmp_path, "hosts:\n  - {host: a, region: eu}\n  - {host: b, region: eu}\n")
    (plan,) = plans_of(resolve(run__workers=2, upstream__every=8), hosts=hosts)
    assert [str(spec.child) for spec in plan.processes("h:1")] == ["server", "worker 0", "worker 1"]
    assert plan.server is not None and settings_of(plan.server.argv).run.mode == "sync"


@pytest.mark.parametrize(
    ("flags", "sets", "above", "steps"),
    [
        ({}, (), "localsgd", 4),
        ({"upstream__every": 0}, (), "localsgd", 4),
        ({"upstream__every": 16}, (), "diloco", 16),
        ({"upstream__every": 16}, ("upstream.mode=async_diloco",), "async_diloco", 16),
    ],
)
def test_the_mode_above(flags: dict[str, Any], sets: tuple[str, ...], above: str, steps: int) -> None:
    resolved = resolve("policy.delayed_update=true", *sets, launch__regions=2, policy__local_steps=4, **flags)
    alone, plan = plans_of(resolved, "single", "localsgd")
    assert len(alone.processes()) == 1 and not alone.workers_of
    assert plan.server is not None
    config, relay = settings_of(plan.server.argv), settings_of(plan.shards("h:1")[0].argv)
    assert (config.run.mode, config.policy.options(above).local_steps) == (above, steps)
    assert (relay.run.mode, relay.policy.options("localsgd").local_steps) == ("localsgd", 4)
    assert (config.policy.delayed_update, relay.policy.delayed_update) == (False, True)


def test_with_mutual_tls_a_relay_has_a_workers_certificate_too() -> None:
    sets = ["security.ca=lab/ca.crt", "security.cert=lab/server.crt", "security.key=lab/server.key"]
    resolved = resolve(*sets, "security.mutual=true", launch__regions=2)
    with pytest.raises(UsageError, match=r"security\.mutual: worker 0 needs a certificate"):
        plans_of(resolved)
    (plan,) = plans_of(resolved, exists=lambda path: path in {f"lab/rank-{rank}.crt" for rank in range(2)})
    specs = plan.processes("h:1")
    relays = [settings_of(spec.argv) for spec in specs[1:3]]
    assert [relay.upstream.cert for relay in relays] == ["lab/rank-0.crt", "lab/rank-1.crt"]
    assert {relay.security.cert for relay in relays} == {"lab/server.crt"}
    files = ("ca.crt", "server.crt", "server.key", "rank-1.crt", "rank-1.key")
    assert specs[2].needs == tuple(f"lab/{name}" for name in files)
    shown = [settings_of(spec.argv).security.cert for spec in specs[3:]]
    assert shown == [f"lab/rank-{rank}.crt" for rank in (0, 1, 0, 1)], "the ranks that they have in their region"


def test_options_of_one_mode_stay_out_of_the_other() -> None:
    resolved = resolve(launch__regions=2, upstream__every=8, run__mode="ssp", policy__staleness=5, policy__outer_lr=0.5)
    (plan,) = plans_of(resolved)
    server, relay, *_ = plan.processes("h:1")
    words = [" ".join(spec.argv) for spec in (server, relay)]
    assert ["policy.outer_lr" in text for text in words] == [True, False]
    assert ["policy.staleness" in text for text in words] == [False, True]


@pytest.mark.parametrize(
    ("flags", "sets", "words"),
    [
        ({"server__shards": 2}, (), "2 regions, and --shards 2: the server above is one process"),
        ({"launch__colocate": True}, (), "2 regions, and --colocate"),
        ({"run__workers": 5}, (), "5 workers cannot be divided equally among 2 regions"),
        ({"run__mode": "allreduce"}, (), "and mode allreduce, .*: the run above would be in this mode"),
        (
            {"run__mode": "allreduce", "upstream__every": 8, "policy__staleness": 1}, (),
            "2 regions, and policy.staleness is 1",
        ),
        ({"run__mode": "async"}, (), "and mode async, which has no rounds: the run above would take"),
        ({"upstream__every": 8}, ("upstream.mode=sync",), "mode sync: it would have to exchange weights"),
        ({}, ("upstream.mode=localsgd",), "without --upstream-every K the run above has the mode of the regions"),
        ({"upstream__every": 8, "policy__local_steps": 4}, (), "flag --local-steps has no effect together with 2"),
        ({"upstream__every": 8, "launch__regions": None}, (), "flag --upstream-every: there are no regions"),
        ({"run__mode": "diloco"}, ("policy.fragments=2",), "policy.fragments is 2, and 2 regions"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(flags: dict[str, Any], sets: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        plans_of(resolve(*sets, **{"launch__regions": 2, **flags}))
    assert raised.value.fix


def test_hosts_without_a_region_or_a_worker(tmp_path: Path) -> None:
    hosts = hosts_of(tmp_path, HOSTS + "  - f\n")
    with pytest.raises(UsageError, match="hosts without a region, although others have one: f"):
        plans_of(resolve(), hosts=hosts)
    with pytest.raises(UsageError, match="region us has no worker: 4 workers fill the regions before it"):
        plans_of(resolve(), hosts=hosts[:-1])


# ---- real processes -----------------------------------------------------------------------------------

RUN = ("-m", "paramserver.launch", "-n", "4", "--task", "linear", "--mode", "sync")


@pytest.mark.slow
@pytest.mark.parametrize("every", ["0", "8"])
def test_a_killed_relay_is_started_again_and_the_run_is_whole(marked, read_until, every: str) -> None:
    launcher = marked.start(
        *RUN, "--steps", "300", "--regions", "2", "--upstream-every", every, "--summary", "summary.json",
        *("--set", "launch.backoff_s=0.01", "--set", "slowdown.base_s=0.02", "--set", "policy.min_workers=4"),
        *("--set", "launch.status_interval_s=0.1"),
    )  # fmt: skip
    first = read_until(launcher.stderr, "[relay 1] listening")
    read_until(launcher.stderr, "training loss")
    children = psutil.Process(launcher.pid).children(recursive=True)
    (relay,) = [process for process in children if "upstream.rank=1" in process.cmdline()]
    relay.kill()
    read_until(launcher.stderr, "relay 1 failed: killed by SIGKILL; started again in 0.01 s (restart 1 of 3)")
    again = read_until(launcher.stderr, "[relay 1] listening")
    assert again.split("address=")[1].split()[0] == first.split("address=")[1].split()[0]
    out, err = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 0, err
    assert "started again" not in err, "no other process"
    summary = Summary.model_validate(json.loads((marked.folder / "summary.json").read_text()))
    assert [worker.training_steps for worker in summary.workers] == [300, 300]
    for rank, worker in enumerate(summary.workers):
        assert (worker.region, worker.region_workers) == (str(rank), 2)
        # As of the newest heartbeat, up to 1.25 s old.
        assert worker.region_bytes > worker.num_bytes / 2 > 0, "also what the killed relay has counted"
    assert "2 regions: 0 (2 workers), 1 (2 workers); " in out
    above = "diloco (8 local steps)" if every == "8" else "sync"
    assert f"sync in 2 regions, {above} above   " in out
    assert marked.left() == []
