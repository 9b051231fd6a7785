"""Where a setting comes from, which source wins, and what a user's mistake looks like: never a traceback."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paramserver.common.config.schema import Config
from paramserver.common.config.sources import Resolved, load_config, of_mode, scalar_text
from paramserver.common.errors import UsageError
from paramserver.common.registry import MODES

YAML = "one `name: value` a line, indented with spaces, every bracket and quote closed; see configs/"


def load(
    path: Any = None,
    flags: dict[str, Any] | None = None,
    sets: list[str] | None = None,
    environ: dict[str, str] | None = None,
) -> Resolved:
    return load_config(str(path) if path is not None else None, flags or {}, sets or [], environ or {})


def mistake(call: Callable[[], Any]) -> UsageError:
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.exit_code == 2
    assert "pydantic" not in caught.value.message
    return caught.value


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


# ---- precedence -------------------------------------------------------------------------------


# From the weakest to the strongest; `run.workers` is the one key that all of them can set.
SOURCES = ["launcher", "yaml", "environment", "set", "flag"]


@pytest.mark.parametrize("given", [c for n in range(6) for c in itertools.combinations(SOURCES, n)], ids="+".join)
def test_the_strongest_source_wins(given: tuple[str, ...], write: Callable[[str], Path]) -> None:
    path = write("# comment\nrun:\n  steps: 9\n  workers: 12\n") if "yaml" in given else None
    environ = {}
    if "launcher" in given:
        environ["WORLD_SIZE"] = "11"
    if "environment" in given:
        environ["PS_RUN__WORKERS"] = "13"
    resolved = load(
        path,
        flags={"run.workers": 15 if "flag" in given else None},
        sets=["run.workers=14"] if "set" in given else [],
        environ=environ,
    )
    expected = {
        "launcher": (11, "environment WORLD_SIZE"),
        "yaml": (12, f"{path}:4"),
        "environment": (13, "environment PS_RUN__WORKERS"),
        "set": (14, "--set run.workers"),
        "flag": (15, "flag --workers"),
    }
    value, origin = expected[given[-1]] if given else (None, "default")
    assert resolved.config.run.workers == value
    assert ("run.workers", str(value), origin) in resolved.rows()
    assert resolved.was_set("run.workers") == bool(given)
    assert resolved.config.run.steps == (9 if path else None)


ADDRESSES = ("worker.server", "server.listen", "server.coordinator", "server.advertise", "server.metrics")


@pytest.mark.parametrize(
    "address",
    ["", "here", ":5", "a:", "a:b", "a:65536", "a:-1", "a:²", "http://a:80", "a b:5", "[::1:5", "fe80::1", "::1:50051"],
)
def test_what_is_no_address_is_refused_before_anything_is_loaded(address: str) -> None:
    for key in ADDRESSES:
        error = mistake(lambda key=key: load(sets=[f"{key}={address!r}"]))
        assert f"{key}: '{address}' is not HOST:PORT" in error.message


def test_port_0_is_where_one_listens_and_none_is_no_server() -> None:
    assert load(sets=["server.listen=127.0.0.1:0", "worker.server=none"]).config.worker.server == "none"
    assert "port 0" in mistake(lambda: load(sets=["worker.server=host:0"])).message


def test_the_last_set_wins() -> None:
    assert load(sets=["run.steps=1", "run.steps=2"]).config.run.steps == 2


def test_a_wrong_value_in_a_weaker_source_is_not_looked_at(write: Callable[[str], Path]) -> None:
    assert load(write("run: {steps: many}\n"), flags={"run.steps": 3}).config.run.steps == 3


def test_ps_server_is_an_environment_setting_like_any_other(write: Callable[[str], Path]) -> None:
    """Stronger than the file and than what an engine says, weaker than its own long name and than a flag."""
    path = write("worker:\n  server: file:1\n")
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "engine"}
    expected = [
        ("engine:50051", "environment MASTER_ADDR"),
        ("file:1", f"{path}:2"),
        ("short:1", "environment PS_SERVER"),
        ("long:1", "environment PS_WORKER__SERVER"),
        ("flag:1", "flag --server"),
    ]
    for count, (address, origin) in enumerate(expected):
        resolved = load(
            path if count > 0 else None,
            environ=environ | ({"PS_SERVER": "short:1"} if count > 1 else {})
            | ({"PS_WORKER__SERVER": "long:1"} if count > 2 else {}),
            flags={"worker.server": "flag:1" if count > 3 else None},
        )  # fmt: skip
        assert (resolved.config.worker.server, resolved.origins["worker.server"]) == (address, origin)


def test_nested_values_are_merged_key_by_key(write: Callable[[str], Path]) -> None:
    path = write("task:\n  name: linear\n  args: {hidden: 8, noise: 0.5}\n")
    resolved = load(path, environ={"PS_TASK__ARGS__HIDDEN": "16"}, sets=["task.args.extra=[1, 2]"])
    assert resolved.config.task.args == {"hidden": 16, "noise": 0.5, "extra": [1, 2]}
    (origins,) = (origin for key, _, origin in resolved.rows() if key == "task.args")
    assert set(origins.split(", ")) == {f"{path}:3", "environment PS_TASK__ARGS__HIDDEN", "--set task.args.extra"}
    assert load(path, sets=["task.args={a: 1}"]).config.task.args == {"a": 1}


def test_optimizer_arguments_are_free() -> None:
    resolved = load(
        sets=["optimizer.weight_decay=1e-2", "optimizer.betas=[0.9, 1e-1]"], environ={"PS_OPTIMIZER__LR": "1"}
    )
    assert resolved.config.optimizer.arguments() == {"lr": 1.0, "weight_decay": 0.01, "betas": [0.9, 0.1]}
    assert ("optimizer.weight_decay", "0.01", "--set optimizer.weight_decay") in resolved.rows()


# ---- what is printed ---------------------------------------------------------------------------


def test_every_setting_is_a_row_with_its_origin(write: Callable[[str], Path]) -> None:
    path = write("run:\n\n  steps: 7\n")
    rows = {key: (value, origin) for key, value, origin in load(path).rows()}
    sections = {name: info.annotation for name, info in Config.model_fields.items()}
    fields = {f"{name}.{leaf}" for name, section in sections.items() for leaf in section.model_fields}
    options = {f"policy.{name}" for mode in MODES.names() for name in MODES.load(mode).Options.model_fields}
    assert set(rows) == fields | options
    assert rows["run.steps"] == ("7", f"{path}:3")
    assert rows["run.seed"] == ("0", "default")
    assert {origin for key, (_, origin) in rows.items() if key != "run.steps"} == {"default"}


# ---- mistakes name file:line and the nearest key -------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "says", "fix"),
    [
        ("run:\n  stepz: 3\n", 2, "unknown key 'run.stepz'", "did you mean 'run.steps'?"),
        ("run:\n  staleness: 3\n", 2, "unknown key 'run.staleness'", "did you mean 'policy.staleness'?"),
        ("rum:\n  steps: 3\n", 1, "unknown section 'rum'", "did you mean 'run'?"),
        ("\n\nsteps: 3\n", 3, "unknown section 'steps'", "did you mean 'run.steps'?"),
        ("run: 3\n", 1, "'run' is a section, not a value", ""),
        ("run: [steps]\n", 1, "'run' is a section, not a value", ""),
        ("- run\n", 1, "expected sections", "see configs/digits.yaml"),
        ("run:\n  steps: 0\n", 2, "run.steps: input should be greater than or equal to 1, got 0", ""),
        ("run:\n  steps: [1]\n", 2, "run.steps: input should be a valid integer, got [1]", ""),
        (f"run:\n  steps: [{'1, ' * 99}]\n", 2, f"run.steps: input should be a valid integer, got [{'1, ' * 33}", ""),
        ("run:\n  seed:\n", 2, "run.seed: input should be a valid integer, got None", ""),
        ("run:\n  mode: spp\n", 2, "unknown mode 'spp'", "did you mean 'ssp'?"),
        ("worker:\n  codec: itn8\n", 2, "unknown codec 'itn8'", "did you mean 'int8'?"),
        ("task: {name: xor}\nrun: {mode: xor}\n", 2, "unknown mode 'xor'", f"known: {', '.join(MODES.names())}"),
        ("task:\n  name: diggits\n", 2, "unknown task 'diggits'", "did you mean 'digits'?"),
        ("policy:\n  weighting: size\n", 2, "policy.weighting: input should be 'samples' or 'equal', got 'size'", ""),
        ("optimizer:\n  lr: 0\n", 2, "optimizer.lr: input should be greater than 0, got 0", ""),
        ("worker:\n  device: gpu\n", 2, "worker.device: string should match pattern", ""),
        ("output:\n  save: w.pt\n", 2, "the name must end in .safetensors", ""),
        ("run:\n  steps: 3\n bad: indent\n", 3, "not valid YAML", YAML),
        ("run:\n\tsteps: 3\n", 2, "not valid YAML", YAML),
        ("run: {steps: 3\n", 2, "not valid YAML", YAML),
        ("run:\n  steps: *nobody\n", 2, "not valid YAML", YAML),
        ("run: {}\n---\nrun: {}\n", 2, "not valid YAML", YAML),
    ],
)
def test_a_mistake_in_the_file(text: str, line: int, says: str, fix: str, write: Callable[[str], Path]) -> None:
    path = write(text)
    error = mistake(lambda: load(path))
    assert error.message.startswith(f"{path}:{line}: "), error.message
    assert says in error.message
    assert error.fix == fix


@pytest.mark.parametrize(
    "text",
    [
        "run:\n  steps: !!python/object:os.system {}\n",
        "run:\n  steps: !mine 3\n",
        "run:\n  steps: !!int abc\n",
        "task:\n  args: &loop\n    again: *loop\n",
        "task:\n  args: {[1, 2]: 3}\n",
    ],
)
def test_yaml_that_cannot_be_built_is_a_mistake_of_the_user(text: str, write: Callable[[str], Path]) -> None:
    """Valid YAML syntax, no value: the user sees file and line, not a traceback."""
    path = write(text)
    error = mistake(lambda: load(path))
    assert re.match(rf"{re.escape(str(path))}:\d+: ", error.message), error.message


def test_several_mistakes_are_told_at_once(write: Callable[[str], Path]) -> None:
    path = write("run:\n  steps: 0\n  seed: -1\npolicy:\n  staleness: -3\n")
    lines = mistake(lambda: load(path)).message.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{path}:2", f"{path}:3", f"{path}:5"]


@pytest.mark.parametrize(
    ("sources", "begins"),
    [
        ({"flags": {"run.steps": 0}}, "flag --steps: run.steps: "),
        ({"flags": {"task.name": "digit"}}, "flag --task: unknown task 'digit'"),
        ({"flags": {"log.format": "xml"}}, "flag --log-format: log.format: "),
        ({"flags": {"policy.local_steps": 0}}, "flag --local-steps: policy.local_steps: "),
        ({"sets": ["run.steps=0"]}, "--set run.steps: run.steps: "),
        ({"sets": [" run.stepz = 3"]}, "--set run.stepz: unknown key 'run.stepz'"),
        ({"environ": {"PS_RUN__STEPS": "x"}}, "environment PS_RUN__STEPS: run.steps: "),
        ({"environ": {"PS_RUN__STEPZ": "3"}}, "environment PS_RUN__STEPZ: unknown key 'run.stepz'"),
        ({"environ": {"PS_RUM__STEPS": "3"}}, "environment PS_RUM__STEPS: unknown section 'rum'"),
        ({"environ": {"RANK": "first"}}, "environment RANK: worker.rank: "),
        ({"environ": {"WORLD_SIZE": "0"}}, "environment WORLD_SIZE: run.workers: "),
        ({"environ": {"OMPI_COMM_WORLD_RANK": "-1"}}, "environment OMPI_COMM_WORLD_RANK: worker.rank: "),
        ({"environ": {"RANK": "[1]"}}, "environment RANK: worker.rank: "),
        ({"environ": {"RANK": "0", "LOCAL_RANK": "left"}}, "environment LOCAL_RANK: worker.local_rank: "),
    ],
)
def test_a_mistake_elsewhere_names_its_source(sources: dict[str, Any], begins: str) -> None:
    assert mistake(lambda: load(**sources)).message.startswith(begins)


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["run.workers=2", "policy.min_workers=3"], "policy.min_workers is 3, but run.workers is 2"),
        (["run.workers=2", "policy.backup_workers=2"], "policy.backup_workers is 2: it must be below run.workers, 2"),
        (["run.workers=2", "worker.rank=2"], "worker.rank is 2: with run.workers 2 it is 0..1 "
         "(run.workers: --set run.workers, worker.rank: --set worker.rank)"),
        (["output.save_averaged=true"], "output.save_averaged needs store.polyak"),
        (["slowdown.straggler_rank=1"], "straggler_rank and straggler_every go together"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together(sets: list[str], says: str) -> None:
    assert says in mistake(lambda: load(sets=sets)).message


@pytest.mark.parametrize(
    ("name", "says"),
    [(name, "cannot read the configuration") for name in ("nothing.yaml", "")] + [("latin.yaml", "is not UTF-8 text")],
)
def test_a_file_that_cannot_be_read(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"# caf\xe9\n")
    error = mistake(lambda: load(tmp_path / name))
    assert says in error.message and str(tmp_path / name) in error.message and "configs/" in error.fix


@pytest.mark.parametrize("text", ["", "# nothing\n", "run:\n", "run: {}\n"])
def test_a_file_without_settings_is_fine(text: str, write: Callable[[str], Path]) -> None:
    assert load(write(text)).config == Config()


# ---- --set ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "run.steps", "steps=3", "=3"])
def test_a_set_of_another_form(text: str) -> None:
    error = mistake(lambda: load(sets=[text]))
    assert "not of the form section.key=value" in error.message and error.fix == "e.g. --set policy.staleness=2"


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ([".steps=3"], "unknown section ''"), (["run.=3"], "run.: extra inputs"), (["run..steps=3"], "extra inputs"),
        (["run.steps.=3"], "run.steps: input should be a valid integer"), (["run.steps.x=3", "run.steps=many"], "many"),
        (["run.steps=3", "run.steps.x=3"], "--set run.steps.x: nothing can be set below 'run.steps', which is a value"),
        (["task.args=5", "task.args.hidden=3"], "nothing can be set below 'task.args', which is a value"),
    ],
)  # fmt: skip
def test_a_set_of_a_key_that_cannot_be(sets: list[str], says: str) -> None:
    assert says in mistake(lambda: load(sets=sets)).message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("1E-3", 1e-3), ("-1e3", -1000.0), (".5", 0.5), ("1.", 1.0), ("-3", -3), ("null", None),
        ("", None), ("[1e-3, 2]", [1e-3, 2]), ("{a: 1e-3}", {"a": 1e-3}), ("!!float 1e-3", 1e-3), (".inf", math.inf),
        *((text, text) for text in ("text", "1.2.3", "e3", "1e", "10.0.0.1:50051", "a: b: c", "[unclosed", "*alias",
                                    "!tag x", "a=b", "2024-13-45", "2024-01-31")),
    ],
)  # fmt: skip
def test_values_are_what_people_mean(text: str, value: Any) -> None:
    got = load(sets=[f"task.args.x={text}"]).config.task.args["x"]
    assert got == value
    assert type(got) is type(value)
    assert load(environ={"PS_TASK__ARGS__X": text}).config.task.args["x"] == value


# What a value without quotes is to a field of any type, of text, of an integer, of a number and a switch.
REFUSED = object()
MEANT = {
    **{text: (text, text, REFUSED, REFUSED, REFUSED) for text in
       ("1:30", "1_000", "no", "yes", "on", "y", "0b11", "nan", "\u0663")},
    "010": ("010", "010", 10, 10.0, REFUSED),
    "007": ("007", "007", 7, 7.0, REFUSED),
    "true": (True, "true", REFUSED, REFUSED, True),
    "False": (False, "False", REFUSED, REFUSED, False),
    "0o17": (15, "0o17", 15, 15.0, REFUSED),
    "017": ("017", "017", 17, 17.0, REFUSED),
    "0x10": (16, "0x10", 16, 16.0, REFUSED),
    "1e3": (1000.0, "1e3", 1000, 1000.0, REFUSED),
    "1.10": (1.1, "1.10", REFUSED, 1.1, REFUSED),
    "+3": (3, "+3", 3, 3.0, REFUSED),
    "'3'": ("3", "3", REFUSED, REFUSED, REFUSED),
}  # fmt: skip


@pytest.mark.parametrize("source", ["set", "environment", "file", "flag"])
@pytest.mark.parametrize("text", MEANT)
def test_a_value_without_quotes_is_what_its_field_wants(text: str, source: str, write: Callable[[str], Path]) -> None:
    """By YAML 1.2 and the same from every source; YAML 1.1 makes 010 eight, 1:30 ninety and `no` a switch."""
    keys = ("task.args.x", "output.project", "run.seed", "server.absent_s", "server.direct")
    for key, expected in zip(keys, MEANT[text], strict=True):
        if source == "flag" and (key == "task.args.x" or "'" in text):
            continue  # no flag; a shell has taken the quotes
        section, _, rest = key.partition(".")
        body = f"args: {{x: {text}}}" if key == "task.args.x" else f"{rest}: {text}"
        given: dict[str, dict[str, Any]] = {
            "set": {"sets": [f"{key}={text}"]},
            "environment": {"environ": {f"PS_{key.upper().replace('.', '__')}": text}},
            "file": {"path": write(f"{section}:\n  {body}\n")},
            "flag": {"flags": {key: text}},
        }
        if expected is REFUSED:
            error = mistake(lambda given=given: load(**given[source]))
            assert key in error.message and ("got " in error.message or text in error.message)
            continue
        config = load(**given[source]).config
        found = config.task.args["x"] if key == "task.args.x" else getattr(getattr(config, section), rest)
        assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize("value", ["yes", "on", "[yes, 0.9]", "[true]", "1:30", "{a: 1}", "fast"])
def test_an_argument_of_the_optimizer_is_a_number_or_a_switch(value: str) -> None:
    assert "optimizer.momentum" in mistake(lambda: load(sets=[f"optimizer.momentum={value}"])).message


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc_", min_size=1), inner, max_size=4),
    max_leaves=8,
)


@given(value=json_like)
@example(value="1e3")
@example(value="yes")
@example(value="007")
@example(value="0o17")
@example(value="2024-01-01")
@example(value="a: b")
@example(value=" padded ")
@example(value="two\nlines")
@example(value=["1e3"])
@example(value={"a": "1.5"})
@settings(max_examples=300, deadline=None)
def test_scalar_text_is_read_back_as_the_value(value: Any) -> None:
    """What the launcher writes for its children."""
    text = scalar_text(value)
    got = load(sets=[f"task.args.x={text}"]).config.task.args["x"]
    assert got == value
    assert isinstance(got, bool) == isinstance(value, bool)


@given(name=st.text(max_size=30), value=st.text(max_size=30))
@settings(max_examples=300, deadline=None)
def test_no_set_gives_a_traceback(name: str, value: str) -> None:
    for text in (f"{name}={value}", f"run.{name}={value}", f"task.args.{name}={value}", f"run.steps={value}"):
        with contextlib.suppress(UsageError):
            load(sets=[text])


@given(text=st.text(alphabet="runsteplr:{}[]&*!-'\"\n 019.,#|>%@?", max_size=60))
@example(text="task:\n  args: {when: 2024-13-45}\n")
@example(text="run: {steps: !x 3}")
@example(text="? [a]\n: 3\n")
@example(text="run:\n  ? [a]\n  : 3\n")
@example(text="<<: {run: {}}")
@settings(max_examples=400, deadline=None)
def test_no_file_gives_a_traceback(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text, encoding="utf-8")
    with contextlib.suppress(UsageError):
        load(path)


# ---- what would be ignored ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "first", "second", "key"),
    [
        ("run:\n  steps: 10\n  seed: 1\n  steps: 20\n", 2, 4, "steps"),
        ("run:\n  steps: 10\npolicy:\n  staleness: 1\nrun:\n  seed: 1\n", 1, 5, "run"),
        ("task:\n  name: linear\n  args: {seed: 1,\n    seed: 2}\n", 3, 4, "seed"),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_both_lines(write, text, first, second, key):
    path = write(text)
    error = mistake(lambda: load(path))
    assert error.message == f"{path}:{second}: '{key}' is set already in {path}:{first}"


def test_a_flag_of_another_mode_is_refused_and_a_file_may_hold_the_options_of_several(write):
    path = write("policy: {straggler_timeout_s: 1, staleness: 2}\n")
    load(path, {"run.mode": "async"}).check_options(["async"])
    resolved = load(path, {"run.mode": "async", "policy.straggler_timeout_s": 2.0})
    error = mistake(lambda: resolved.check_options(["async"]))
    assert error.message == "flag --straggler-timeout-s: mode async has no such option, so it would have no effect"
    assert error.fix == "leave it out, or use a mode that has it: diloco, localsgd, sync"
    resolved.check_options(["async", "sync"])


def test_what_no_mode_of_the_run_reads_is_refused_with_set_and_told_of_a_file(write):
    path = write("policy: {local_steps: 4, staleness: 2}\n")
    assert load(path).unread(["allreduce"]) == ["policy.local_steps"]
    load(path).check_options(["allreduce"], also="--set ")
    resolved = load(path, sets=["policy.local_steps=4"])
    error = mistake(lambda: resolved.check_options(["allreduce"], also="--set "))
    assert error.message == "--set policy.local_steps: mode allreduce has no such option, so it would have no effect"
    resolved.check_options(["allreduce", "localsgd"], also="--set ")
    assert load(path).unread(["localsgd"]) == ["policy.staleness"]
    assert load(path).unread(["async"]) == ["policy.local_steps", "policy.staleness"]


def test_of_what_several_modes_are_told_each_has_its_own():
    flags = {"policy.local_steps": 4, "run.lr": 0.1, "policy.weighting": None}
    sets = ["policy.staleness=2", "run.steps=5"]
    assert of_mode("sync", flags, sets) == ({"run.lr": 0.1, "policy.weighting": None}, ["run.steps=5"])
    assert of_mode("localsgd", flags, sets) == (flags, ["run.steps=5"])
    assert of_mode("ssp", flags, sets)[1] == sets
