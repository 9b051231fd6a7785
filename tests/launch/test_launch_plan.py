"""The plan: command lines and environments, as values."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paramserver.launch.plan as plan_module
from paramserver.common.config_sources import Resolved, load_config
from paramserver.common.errors import UsageError
from paramserver.launch.plan import SERVER, Machine, Plan, Request, plan_runs, save_path

MACHINE = Machine(python="python", num_cores=8)


def resolve(*sets: str, path: str | None = None, **flags: Any) -> Resolved:
    dotted = {key.replace("__", "."): value for key, value in flags.items()}
    return load_config(path, {"run.workers": 4, **dotted}, list(sets), {})


def plan_of(resolved: Resolved, mode: str = "sync", **request: Any) -> Plan:
    return plan_runs(resolved, Request(modes=(mode,), **request), MACHINE)[0]


def sets_of(argv: tuple[str, ...]) -> list[str]:
    return [argv[index + 1] for index, word in enumerate(argv) if word == "--set"]


def test_a_server_and_its_workers() -> None:
    plan = plan_of(resolve(run__steps=7), config_path="run.yaml")
    assert plan.server is not None
    assert plan.server.argv == (
        *("python", "-m", "paramserver.ps", "--config", "run.yaml"),
        *("--set", "run.workers=4", "--set", "run.steps=7", "--set", "server.listen=127.0.0.1:0"),
    )
    workers = plan.workers("127.0.0.1:4000")
    assert [str(spec.child) for spec in workers] == ["worker 0", "worker 1", "worker 2", "worker 3"]
    assert workers[3].argv == (
        *("python", "-m", "paramserver.worker", "--config", "run.yaml"),
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


@given(num_workers=st.integers(1, 200), num_cores=st.integers(1, 256))
def test_workers_never_get_more_threads_than_there_are_cores(num_workers: int, num_cores: int) -> None:
    machine = Machine(python="python", num_cores=num_cores)
    resolved = load_config(None, {"run.workers": num_workers}, [], {})
    workers = plan_runs(resolved, Request(modes=("async",)), machine)[0].workers("h:1")
    assert [spec.child.rank for spec in workers] == list(range(num_workers))
    num_threads = [int(spec.env["OMP_NUM_THREADS"]) for spec in workers]
    assert min(num_threads) >= 1
    assert sum(num_threads) <= max(num_cores, num_workers)


def test_threads_are_left_alone_where_someone_chose_them() -> None:
    chosen = Machine(python="python", num_cores=8, environ={"OMP_NUM_THREADS": "3"})
    by_variable = plan_runs(resolve(), Request(modes=("sync",)), chosen)[0]
    by_setting = plan_of(resolve("worker.threads=2"))
    for plan in (by_variable, by_setting):
        assert "OMP_NUM_THREADS" not in plan.workers("h:1")[0].env


def test_single_trains_alone_on_the_union_batch() -> None:
    resolved = resolve("policy.min_workers=4", "policy.backup_workers=1", run__batch_size=16, run__mode="ssp")
    plan = plan_of(resolved, "single")
    assert plan.server is None
    (worker,) = plan.workers(None)
    assert worker.argv[-4:] == ("--server", "none", "--rank", "0")
    child = load_config(None, {}, sets_of(worker.argv), {}).config
    assert (child.run.batch_size, child.run.workers, child.run.steps) == (64, 1, 500)
    assert worker.env["OMP_NUM_THREADS"] == "8"
    assert plan.reporter == worker.child


def test_several_modes_save_to_their_own_files_and_leave_the_summary_to_the_launcher() -> None:
    resolved = resolve(output__save="out/w.safetensors", output__summary="all.json", run__mode="sync")
    plans = plan_runs(resolved, Request(modes=("sync", "async")), MACHINE)
    assert [plan.save for plan in plans] == ["out/w-sync.safetensors", "out/w-async.safetensors"]
    for plan in plans:
        assert plan.server is not None
        child = load_config(None, {}, sets_of(plan.server.argv), {}).config
        assert (child.run.mode, child.output.save, child.output.summary) == (plan.mode, plan.save, None)
    assert save_path("w.safetensors", "sync", 1) == "w.safetensors"


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
    resolved = resolve("worker.codec=raw", path=str(path), launch__script="t.py")
    plan = plan_of(resolved, config_path=str(path), script_args=("--epochs", "3"))
    worker = plan.workers("h:1")[2]
    assert worker.argv == ("python", "t.py", "--epochs", "3")
    assert {key: worker.env[key] for key in ("RANK", "WORLD_SIZE", "PS_SERVER")} == {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "PS_SERVER": "h:1",
    }
    assert worker.env["PS_SLOWDOWN__BASE_S"] == "0.5"
    assert worker.env["PS_WORKER__CODEC"] == "raw"
    assert not [name for name in worker.env if name.startswith(("PS_OPTIMIZER", "PS_LAUNCH"))]


def test_a_script_owns_its_optimizer_and_arguments_need_a_script() -> None:
    with pytest.raises(UsageError, match=r"flag --lr together with the script t\.py"):
        plan_of(resolve(launch__script="t.py", optimizer__lr=0.1))
    with pytest.raises(UsageError, match="belong to a script"):
        plan_of(resolve(), script_args=("--epochs",))


def test_plan_and_supervise_are_pure() -> None:
    """They decide; time, processes and the environment come in as arguments."""
    impure = {"torch", "grpc", "time", "random", "threading", "asyncio", "os", "logging", "subprocess"}
    folder = Path(plan_module.__file__).parent
    for name in ("plan.py", "supervise.py", "exits.py", "events.py", "view.py"):
        for node in ast.walk(ast.parse((folder / name).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not impure & {name.partition(".")[0] for name in names}, name
