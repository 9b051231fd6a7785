"""The plan: command lines and environments, as values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.config.sources import load_config
from paramserver.common.errors import UsageError
from paramserver.launch import run
from paramserver.launch.plan.hosts import SERVE, SERVER, place_processes
from paramserver.launch.plan.runs import Machine, Request, plan_runs
from paramserver.launch.plan.settings import own_path, variable
from paramserver.tests.launch.plans import MACHINE, hosts_of, plan_of, resolve, sets_of, settings_of


def test_a_server_and_its_workers() -> None:
    plan = plan_of(resolve(run__steps=7), config_path="run.yaml")
    assert plan.server is not None
    assert plan.server.argv == (
        *("python", "-P", "-m", "paramserver.ps", "--config", "run.yaml"),
        *("--set", "run.workers=4", "--set", "run.steps=7", "--set", "server.listen=127.0.0.1:0"),
    )
    workers = plan.workers("127.0.0.1:4000")
    assert [str(spec.child) for spec in workers] == ["worker 0", "worker 1", "worker 2", "worker 3"]
    assert workers[3].argv == (
        *("python", "-P", "-m", "paramserver.worker", "--config", "run.yaml"),
        *("--set", "run.workers=4", "--set", "run.steps=7"),
        *("--server", "127.0.0.1:4000", "--rank", "3"),
    )
    assert plan.reporter == SERVER


def is_no_number(text: str) -> bool:
    """A text that looks like a number is one, wherever settings are read."""
    try:
        float(text)
    except ValueError:
        return True
    return False


texts = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12).filter(is_no_number)
values = st.one_of(st.integers(-9, 9), st.floats(allow_nan=False, allow_infinity=False), texts, st.booleans())


@settings(max_examples=60, deadline=None)
@given(
    lr=st.floats(1e-9, 1e3),
    name=texts,
    args=st.dictionaries(st.sampled_from(["a", "b", "c"]), st.one_of(values, st.lists(values, max_size=3))),
)
def test_children_read_back_exactly_what_the_flags_said(lr: float, name: str, args: dict[str, Any]) -> None:
    flags = {"optimizer.lr": lr, "task.name": f"my.py:{name}", "task.args": args, "run.workers": 4}
    plan = plan_of(load_config(None, flags, [], {}))
    assert plan.server is not None
    child = load_config(None, {}, sets_of(plan.server.argv), {})
    assert child.config.optimizer == plan.config.optimizer
    assert child.config.task == plan.config.task


@pytest.mark.parametrize(("sets", "sharing"), [
    ((), [0, 4, 4, 4, 4]), (("launch.group=2",), [0, 8, 8, 8, 8]), (("server.shards=2",), [2, 2, 4, 4, 4, 4]),
    (("server.shards=2", "worker.threads=2"), [0] * 6),
])  # fmt: skip
def test_processes_of_a_role_share_the_cores_of_this_machine(sets: tuple[str, ...], sharing: list[int]) -> None:
    assert [spec.sharing for spec in plan_of(resolve(*sets)).processes("h:1")] == sharing


def test_single_trains_alone_on_the_union_batch() -> None:
    resolved = resolve("policy.min_workers=4", "policy.backup_workers=1", run__batch_size=16, run__mode="ssp")
    plan = plan_of(resolved, "single")
    assert plan.server is None
    (worker,) = plan.workers(None)
    assert worker.argv[-4:] == ("--server", "none", "--rank", "0")
    child = settings_of(worker.argv)
    assert (child.run.batch_size, child.run.workers, child.run.steps) == (64, 1, 500)
    assert worker.sharing == 1
    assert plan.reporter == worker.child


def test_seeds_have_their_own_places_too_and_a_report_is_made_of_twenty_evaluations() -> None:
    resolved = resolve(launch__seeds=2, run__seed=3, run__steps=100, output__save="w.safetensors", output__report="out")
    plans = plan_runs(resolved, Request(modes=("sync", "single")), MACHINE)
    assert [(plan.mode, plan.seed) for plan in plans] == [("sync", 3), ("sync", 4), ("single", 3), ("single", 4)]
    assert [plan.save for plan in plans] == [
        *("w-sync-seed3.safetensors", "w-sync-seed4.safetensors", "w-single-seed3.safetensors"),
        "w-single-seed4.safetensors",
    ]
    for plan in plans:
        argv = plan.server.argv if plan.server is not None else plan.worker_argv
        child = settings_of(argv)
        assert (child.run.seed, child.run.eval_every) == (plan.seed, "5")


@pytest.mark.parametrize(
    ("path", "num_modes", "expected"),
    [
        ("w.safetensors", 1, "w.safetensors"),
        ("w.safetensors", 2, "w-sync.safetensors"),
        ("out/run1/", 2, "out/run1-sync"),
        ("/kept", 2, "/kept-sync"),
        (".", 2, "sync"),
        ("..", 2, "../sync"),
        (None, 2, None),
    ],
)
def test_each_mode_has_its_own_place(path: str | None, num_modes: int, expected: str | None) -> None:
    assert own_path(path, "sync", num_modes) == expected


def test_several_modes_keep_snapshots_and_history_apart_and_leave_the_summary_to_the_launcher() -> None:
    resolved = resolve("output.summary=all.json", checkpoint__dir="kept", checkpoint__every_steps=5,
                       output__history="h.jsonl", run__mode="ssp")  # fmt: skip
    plans = plan_runs(resolved, Request(modes=("single", "sync", "ssp")), MACHINE)
    assert [plan.checkpoint_dir for plan in plans] == [None, "kept-sync", "kept-ssp"]
    assert [plan.history for plan in plans] == ["h-single.jsonl", "h-sync.jsonl", "h-ssp.jsonl"]
    assert not [text for text in sets_of(plans[0].worker_argv) if text.startswith("checkpoint.")]
    for plan in plans[1:]:
        assert plan.server is not None
        for argv in (plan.server.argv, plan.worker_argv):
            child = settings_of(argv)
            assert (child.checkpoint.dir, child.checkpoint.every_steps) == (plan.checkpoint_dir, 5)
            assert (child.run.mode, child.output.history, child.output.summary) == (plan.mode, plan.history, None)
        assert f"snapshots in {plan.checkpoint_dir}" in plan.headline()


@pytest.mark.parametrize("resume", ["never", "latest", "old/snapshot"])
@pytest.mark.parametrize("has_snapshot", [False, True])
def test_a_server_is_started_again_where_it_was(resume: str, has_snapshot: bool) -> None:
    """At its address; from its own newest snapshot if it has one, otherwise as the first time."""
    plan = plan_of(resolve(checkpoint__dir="kept", checkpoint__resume=resume, run__steps=7))
    again = plan.process(SERVER, None, listen="127.0.0.1:4321", has_snapshot=has_snapshot)
    assert plan.server is not None
    first, second = (settings_of(spec.argv) for spec in (plan.server, again))
    assert (first.server.listen, second.server.listen) == ("127.0.0.1:0", "127.0.0.1:4321")
    assert second.checkpoint.resume == (None if has_snapshot else resume)
    assert second.run == first.run
    assert (again.child, again.env) == (plan.server.child, plan.server.env)


def test_ps_serve_that_starts_again_gets_no_settings_of_a_server_that_does() -> None:
    plan = plan_of(resolve(checkpoint__dir="kept", checkpoint__resume="never", launch__serve=0))
    assert plan.process(SERVE, "h:1", has_snapshot=True) == plan.serve("h:1")


def test_one_snapshot_is_not_for_several_modes() -> None:
    resolved = resolve(checkpoint__resume="old/snapshot", run__mode="ssp")
    with pytest.raises(UsageError, match=r"flag --resume: old/snapshot is a snapshot of one mode, and 2 are to run"):
        plan_runs(resolved, Request(modes=("sync", "ssp")), MACHINE)
    resolved = resolve(checkpoint__resume="old/snapshot", run__mode="ssp", launch__seeds=3)
    with pytest.raises(UsageError, match=r"old/snapshot is a snapshot of one seed, and 3 are to run"):
        plan_runs(resolved, Request(modes=("ssp",)), MACHINE)


def test_a_worker_alone_takes_no_snapshots(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--mode single, one worker without a server, and --checkpoint-dir"):
        plan_of(resolve(checkpoint__dir="kept"), "single")
    path = tmp_path / "run.yaml"
    path.write_text("checkpoint:\n  dir: kept\n")  # of a configuration for other modes as well
    plan = plan_of(resolve(path=str(path)), "single", config_path=str(path))
    assert plan.checkpoint_dir is None


def test_the_servers_certificate_is_no_workers() -> None:
    files = {"ca": "ca.pem", "cert": "server.pem", "key": "server.key", "token_file": "token"}
    plan = plan_of(resolve(**{f"security__{name}": file for name, file in files.items()}))
    assert plan.server is not None
    assert settings_of(plan.server.argv).security.model_dump(exclude_defaults=True) == files
    for worker in plan.workers("h:1"):
        found = settings_of(worker.argv).security.model_dump(exclude_defaults=True)
        assert found == {"ca": "ca.pem", "token_file": "token"}


@pytest.mark.parametrize(
    ("there", "names"),
    [
        ({"lab/rank-0.crt", "lab/rank-1.crt"}, ["rank-0", "rank-1"]),
        ({"lab/worker.crt"}, ["worker", "worker"]),
        ({"lab/worker.crt", "lab/rank-1.crt"}, ["worker", "rank-1"]),
    ],
)
@pytest.mark.parametrize("script", [None, "t.py"])
def test_with_mutual_tls_each_worker_shows_its_own_certificate(
    there: set[str], names: list[str], script: str | None
) -> None:
    sets = ["security.ca=lab/ca.crt", "security.cert=lab/server.crt", "security.key=lab/server.key"]
    resolved = resolve(*sets, "security.mutual=true", run__workers=2, launch__script=script)
    machine = Machine(python="python", exists=there.__contains__)
    (plan,) = plan_runs(resolved, Request(modes=("sync",)), machine)
    for worker, name in zip(plan.workers("h:1"), names, strict=True):
        environ = {key: value for key, value in worker.env.items() if key.startswith("PS_SECURITY")}
        files = settings_of(worker.argv, **environ).security
        assert (files.cert, files.key) == (f"lab/{name}.crt", f"lab/{name}.key")
        assert (files.ca, files.mutual) == ("lab/ca.crt", True)


def test_with_mutual_tls_each_shard_shows_its_own_certificate() -> None:
    sets = ["security.ca=lab/ca.crt", "security.cert=lab/server.crt", "security.key=lab/server.key"]
    resolved = resolve(*sets, "security.mutual=true", run__workers=1, server__shards=3)
    there = {"lab/worker.crt", *(f"lab/shard-{shard}.crt" for shard in range(3))}
    machine = Machine(python="python", exists=there.__contains__)
    (plan,) = plan_runs(resolved, Request(modes=("sync",)), machine)
    for number, shard in enumerate([plan.server, *plan.shards("h:1")]):
        files = settings_of(shard.argv).security
        assert (files.cert, files.key) == (f"lab/shard-{number}.crt", f"lab/shard-{number}.key")
        assert shard.needs == ("lab/ca.crt", f"lab/shard-{number}.crt", f"lab/shard-{number}.key")
    there.remove("lab/shard-2.crt")
    with pytest.raises(UsageError, match=r"shard 2 needs a .* no shard-2\.crt beside lab/server\.crt") as raised:
        plan_runs(resolved, Request(modes=("sync",)), machine)
    assert raised.value.fix == "ps-certs init lab --renew --shards S makes one for each shard"


def test_the_token_itself_is_in_no_plan() -> None:
    machine = Machine(python="python", environ={"PS_TOKEN": "the secret"})
    resolved = load_config(None, {"run.workers": 2}, [], {"PS_TOKEN": "the secret"})
    (plan,) = plan_runs(resolved, Request(modes=("sync",)), machine)
    assert "the secret" not in repr([plan.server, *plan.workers("h:1"), resolved.rows()])


@pytest.mark.parametrize(
    ("sets", "listen"),
    [
        ([], "127.0.0.1:0"),
        (["launch.port=6000"], "127.0.0.1:6000"),
        (["server.listen=0.0.0.0:7000"], "0.0.0.0:7000"),
        (["server.listen=0.0.0.0:7000", "launch.port=6000"], "0.0.0.0:6000"),
        (["server.listen=[::1]:0"], "[::1]:0"),
    ],
)
def test_where_the_server_listens(sets: list[str], listen: str) -> None:
    server = plan_of(resolve(*sets)).server
    assert server is not None
    assert sets_of(server.argv)[-1] == f"server.listen={listen}"


def test_children_always_log_what_the_launcher_lives_by() -> None:
    server = plan_of(resolve("log.level=error", "log.format=text")).server
    assert server is not None
    assert (server.env["PS_LOG__FORMAT"], server.env["PS_LOG__LEVEL"]) == ("json", "info")
    assert not [text for text in sets_of(server.argv) if text.startswith("log.")]


def test_a_script_gets_its_place_and_the_settings_as_variables(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("slowdown:\n  base_s: 0.5\noptimizer:\n  name: adam\n")
    files = {"output__history": "h.jsonl", "security__ca": "ca.pem"}
    resolved = resolve("worker.codec=raw", path=str(path), launch__script="t.py", **files)
    plan = plan_of(resolved, config_path=str(path), script_args=("--epochs", "3"))
    worker = plan.workers("h:1")[2]
    assert worker.argv == ("python", "t.py", "--epochs", "3")
    assert {key: worker.env[key] for key in ("PS_WORKER__RANK", "PS_RUN__WORKERS", "PS_SERVER")} == {
        "PS_WORKER__RANK": "2",
        "PS_RUN__WORKERS": "4",
        "PS_SERVER": "h:1",
    }
    assert not {"RANK", "WORLD_SIZE"} & worker.env.keys()  # trainers would make a process group of them
    assert worker.env["PS_SLOWDOWN__BASE_S"] == "0.5"
    assert worker.env["PS_WORKER__CODEC"] == "raw"
    assert (worker.env["PS_SECURITY__CA"], worker.env["PS_OUTPUT__HISTORY"]) == ("ca.pem", "h.jsonl")
    assert not [name for name in worker.env if name.startswith(("PS_OPTIMIZER", "PS_LAUNCH"))]


@pytest.mark.parametrize("source", ["flag", "set", "file", "environment"])
def test_a_script_and_its_server_get_the_same_run(tmp_path: Path, source: str) -> None:
    """The variables of a script are those of this run of several, wherever its settings come from."""
    path, chosen = tmp_path / "c.yaml", {"run.mode": "ssp", "run.seed": 3, "run.steps": 9}
    path.write_text("run: {mode: ssp, seed: 3, steps: 9}\n" if source == "file" else "run: {steps: 5}\n")
    environ = {"PS_RUN__MODE": "async", "PS_RUN__SEED": "1", "PS_RUN__EPOCHS": "4"}
    if source in ("environment", "file"):
        environ = {variable(key): str(value) for key, value in chosen.items() if source == "environment"}
    sets = [f"{key}={value}" for key, value in chosen.items()] if source == "set" else []
    flags = {"launch.script": "t.py", "launch.seeds": 2, "run.workers": 2}
    flags |= chosen if source == "flag" else {}
    resolved = load_config(str(path), flags, sets, environ)
    machine = dataclasses.replace(MACHINE, environ=environ)
    for modes in [("ssp",), ("ssp", "sync")]:
        for plan in plan_runs(resolved, Request(modes=modes, config_path=str(path)), machine):
            assert plan.server is not None
            server = load_config(str(path), {}, sets_of(plan.server.argv), {**environ, **plan.server.env}).config.run
            script = load_config(None, {}, [], {**environ, **plan.workers("h:1")[1].env}).config.run
            assert (script.mode, script.seed, script.steps, script.epochs) == (plan.mode, plan.seed, 9, None)
            assert (server.mode, server.seed, server.steps, server.epochs) == (plan.mode, plan.seed, 9, None)


def test_a_script_owns_its_optimizer() -> None:
    with pytest.raises(UsageError, match=r"flag --lr together with the script t\.py"):
        plan_of(resolve(launch__script="t.py", optimizer__lr=0.1))


@pytest.mark.parametrize(("mode", "bound"), [("async", ""), ("ssp", "staleness 3, "), ("dssp", "staleness 3 to 15, ")])
def test_the_headline_says_what_becomes_of_the_optimizer_where_gradients_are_late(mode: str, bound: str) -> None:
    less = f"{bound}lower momentum with more workers"
    found = plan_of(resolve(), mode).headline()
    assert found.startswith(f"{mode} ({less}, above 8 lower rates for late gradients): a server")
    resolution = resolve(policy__late_scale="none")
    assert plan_of(resolution, mode).headline().startswith(f"{mode} ({less}): a server")
    resolution = resolve(policy__late_momentum=False)
    alone = f" ({bound[:-2]})" if bound else ""
    assert plan_of(resolution, mode).headline().startswith(f"{mode}{alone}: a server")


def test_the_headline_says_that_a_run_is_delayed_update() -> None:
    resolved = resolve(policy__delayed_update=True, policy__late_momentum=False)
    assert plan_of(resolved, "ssp").headline().startswith("ssp (staleness 3), delayed_update: a server and 4 workers,")
    assert "delayed_update" not in plan_of(resolved, "single").headline()
    assert "policy.delayed_update=true" in " ".join(plan_of(resolved, "ssp").server.argv)


def test_a_report_says_in_what_the_modes_differ_beside_their_names() -> None:
    resolved = resolve("policy.buffer=3", "policy.staleness=5", run__batch_size=16, run__mode="ssp")
    plans = plan_runs(resolved, Request(modes=("ssp", "localsgd", "buffered", "single")), MACHINE)
    found = run.differences_of(plans)
    assert found["policy.staleness"] == [5, "-", "-", "-"] and found["policy.buffer"] == ["-", "-", 3, "-"]
    assert found["policy.local_steps"] == ["-", 8, "-", "-"] and found["run.batch_size"] == [16, 16, 16, 64]
    assert "run.seed" not in found


HOSTS = "hosts:\n  - {host: a, per_hour: 0.5}\n  - {host: b, per_hour: 2.0}\n  - {host: c, per_hour: 8.0}\n"


@pytest.mark.parametrize(("sets", "rates"), [
    ([], (2.5, 0.5)), (["cost.per_hour=7"], (2.5, 0.5)), (["cost.total_per_hour=9"], (9.0, 9.0)),
])  # fmt: skip
def test_a_plan_costs_what_its_machines_cost_together(
    tmp_path: Path, sets: list[str], rates: tuple[float, float]
) -> None:
    """`single` has the first one alone."""
    places = place_processes(hosts_of(tmp_path, HOSTS), 2, 1, colocate=False, folder=".")
    machine = Machine(python="python", spans_hosts=True, places=places)
    plans = plan_runs(resolve(*sets, run__workers=2), Request(modes=("sync", "single")), machine)
    assert tuple(plan.rate for plan in plans) == rates
    for plan, rate in zip(plans, rates, strict=True):
        assert any(f"cost.total_per_hour={rate}" in spec.argv for spec in plan.processes("h:1")), "so it says it itself"
    assert plan_of(resolve("cost.per_hour=7")).rate == 7.0 and plan_of(resolve()).rate is None


FILES = (
    "output.save=w.safetensors", "output.history=h.jsonl", "output.curve=c.csv", "output.summary=s.json",
    "output.best_weights=b.safetensors", "output.save_averaged=true", "checkpoint.dir=c", "checkpoint.every_s=9",
    "checkpoint.every_steps=5", "server.web=127.0.0.1:0", "server.metrics=127.0.0.1:9", "store.polyak=0.9",
)  # fmt: skip
MUTUAL = ("security.mutual=true", "security.cert=a/b.crt", "security.key=a/b.key", "security.ca=a/ca.crt")


SETS = [
    ("launch.serve=0",),
    ("launch.serve=9000", "launch.web=true", *MUTUAL),
    ("server.shards=3", "server.direct_port=7000", *FILES),
    ("launch.regions=2", "upstream.every=8", "policy.min_workers=3", "checkpoint.resume=latest", *FILES, *MUTUAL),
    ("launch.seeds=3", "output.report=r", "output.name=010", "run.steps=30"),
    ("output.report=r", "run.epochs=3", "cost.per_hour=2"),
    ("launch.group=2", "launch.group_min=1", "worker.pipeline=true", "worker.cut=[2,2]"),
    ("launch.script=t.py", "server.shards=3", "launch.seeds=3", *FILES, *MUTUAL),
]
JOBS = [(sets, modes) for sets in SETS for modes in ["sync", "sync,single", "ssp,async"]
        if not ("single" in modes and "launch.script=t.py" in sets)]  # fmt: skip


@pytest.mark.parametrize(("sets", "modes"), JOBS)
def test_every_process_reads_the_settings_that_it_gets(sets: tuple[str, ...], modes: str) -> None:
    """The launcher's own settings are values of their fields' types: text would be refused where a number is wanted."""
    resolved = resolve(*sets)
    machine = dataclasses.replace(MACHINE, exists=lambda path: True)
    for plan in plan_runs(resolved, Request(modes=tuple(modes.split(","))), machine):
        for spec in plan.processes("h:1"):
            load_config(None, {}, sets_of(spec.argv), spec.env)  # raises UsageError
