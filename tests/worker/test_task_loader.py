"""Loading tasks: every mistake of the configuration is named, the user's own exceptions keep their traceback."""

from __future__ import annotations

import random
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import paramserver.common.user_code
from paramserver.common.errors import UsageError
from paramserver.common.user_code import UserCodeError, format_user_traceback, user_code
from paramserver.worker.tasks.linear import Linear
from paramserver.worker.training.tasks.loading import load_task

CPU = torch.device("cpu")
USER_CODE = Path(paramserver.common.user_code.__file__)

GOOD = """
    class Good:
        def __init__(self, hidden=64, *, seed=None, device=None):
            self.given = (hidden, seed, device)
        def model(self): ...
        def train_data(self): ...
        def loss(self, model, batch): ...
        def evaluate(self, model): ...
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a file of the user's; what loading it does to sys.path and sys.modules is undone."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    before = set(sys.modules)

    def write(content: str, name: str = "their_task.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(content))
        return path

    yield write
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def load(name: str, **args: Any) -> Any:
    return load_task(name, args, seed=7, device=CPU)


def call_as_paramserver(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` under user_code() in a frame of paramserver's, as the trainer calls a task."""
    namespace = {"__name__": "paramserver.worker.trainer", "user_code": user_code}
    exec("def call(function, args):\n    with user_code():\n        return function(*args)\n", namespace)
    return namespace["call"](function, args)


def run(path: Path) -> dict[str, Any]:
    """What the file at `path` defines."""
    names: dict[str, Any] = {"__name__": "their_task"}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names


# What loads


def test_a_built_in_task_gets_seed_and_device_and_task_args_win():
    task = load("linear", num_samples=10)
    assert isinstance(task, Linear)
    assert torch.equal(task.w_star, Linear(seed=7).w_star)
    assert torch.equal(load("linear", num_samples=10, seed=8).w_star, Linear(seed=8).w_star)


def test_a_class_in_a_file_gets_its_arguments(write, monkeypatch):
    path = write(GOOD)
    monkeypatch.chdir(path.parent)
    assert load("their_task.py:Good").given == (64, 7, CPU)
    assert load(f"{path}:Good").given == (64, 7, CPU)
    assert load(f"{path}:Good", hidden=5, seed=1).given == (5, 1, CPU)


def test_a_function_that_returns_a_task_will_do(write):
    path = write(GOOD + "    def build(**anything):\n        return Good(anything['width'])\n")
    assert load(f"{path}:build", width=9).given == (9, None, None)


def test_a_file_named_like_a_known_module_replaces_nothing(write):
    path = write(GOOD, "random.py")
    assert load(f"{path}:Good").given == (64, 7, CPU)
    assert sys.modules["random"] is random


def test_a_file_runs_once_however_often_it_is_named(write):
    write("runs = []", "counter_of_theirs.py")
    path = write("import counter_of_theirs\ncounter_of_theirs.runs.append(1)\n" + textwrap.dedent(GOOD))
    assert type(load(f"{path}:Good")) is type(load(f"{path}:Good"))
    assert sys.modules["counter_of_theirs"].runs == [1]


def test_data_sets_of_the_file_travel_to_spawned_data_loader_workers(write):
    path = write(
        """
        class Squares:
            def __len__(self): return 4
            def __getitem__(self, index): return index ** 2
        class Task:
            def model(self): ...
            def train_data(self): return Squares()
            def loss(self, model, batch): ...
            def evaluate(self, model): ...
        """
    )
    data = load(f"{path}:Task").train_data()
    loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="spawn")
    assert [batch.tolist() for batch in loader] == [[0, 1, 4, 9]]


# Mistakes of the configuration


def test_a_missing_file_is_named_in_full(tmp_path):
    with pytest.raises(UsageError, match="no file") as caught:
        load(f"{tmp_path}/nowhere.py:Task")
    assert str(tmp_path / "nowhere.py") in caught.value.message


@pytest.mark.parametrize(
    ("name", "args", "message", "fix"),
    [
        ("linaer", {}, "unknown task 'linaer'", "did you mean 'linear'"),
        ("linear", {"nois": 1}, r"unknown task\.args\.nois of task linear", "did you mean 'noise'"),
        ("FILE:Godo", {}, "defines no 'Godo'", "did you mean 'Good'"),
        ("FILE:", {}, "defines no ''", "known: Gan, Good, Needy, Partial, Plain, Wrong"),
        ("FILE:LIMIT", {}, "'LIMIT' in .* is of type int, not a class", "model, train_data, loss, evaluate"),
        ("FILE:Good", {"hiden": 1}, r"unknown task\.args\.hiden", "did you mean 'hidden'"),
        ("FILE:Plain", {"hidden": 1}, r"unknown task\.args\.hidden", "takes no arguments"),
        ("FILE:Needy", {}, r"needs task\.args\.depth, task\.args\.width", r"--set task\.args\.depth=VALUE"),
        ("FILE:Partial", {}, "of type Partial without train_data, evaluate", r"evaluate\(model\)"),
        ("FILE:Gan", {}, r"has a method optimizers\(\), .* a task has one optimizer", r"session\.optimizers\(\)"),
        ("FILE:Wrong", {}, r"loss\(model\) cannot be called as loss\(model, batch\)", "these parameters"),
    ],
)
def test_a_mistake_is_named_with_the_nearest_right_thing(write, name, args, message, fix):
    path = write(
        GOOD
        + """
    class Needy(Good):
        def __init__(self, depth, *, width): ...
    class Partial:
        def model(self): ...
        def loss(self, model, batch): ...
        train_data = 5
    class Plain:
        pass
    class Gan(Good):
        def optimizers(self, model): ...
    class Wrong(Good):
        def loss(self, model): ...
    LIMIT = 5
    """
    )
    with pytest.raises(UsageError, match=message) as caught:
        load(name.replace("FILE", str(path)), **args)
    assert re.search(fix, caught.value.fix)


# Exceptions of the user's own code


def frames(text: str) -> list[str]:
    """The file and line of every frame of a printed traceback."""
    return [line.strip() for line in text.splitlines() if line.startswith('  File "')]


@pytest.mark.parametrize(
    ("content", "name", "line", "where"),
    [
        ("x = 1\nraise ValueError('mine')", "Task", 2, "<module>"),
        ("class Task:\n    def __init__(self):\n        raise ValueError('mine')", "Task", 3, "__init__"),
        ("class Task:\n    def __init__(self):\n        raise TypeError('mine')", "Task", 3, "__init__"),
        ("def task():\n    raise ValueError('mine')", "task", 2, "task"),
    ],
)
def test_an_exception_while_loading_shows_the_users_frames_only(write, content, name, line, where):
    path = write(content)
    with pytest.raises(UserCodeError, match=r"(Value|Type)Error: mine") as caught:
        load(f"{path}:{name}")
    assert isinstance(caught.value.original, ValueError | TypeError)
    text = format_user_traceback(caught.value)
    assert frames(text) == [f'File "{path}", line {line}, in {where}']
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("Error: mine\n")


def test_a_syntax_error_shows_its_line_and_no_importlib(write):
    path = write("class Task:\n    def model(self) return 1\n")
    with pytest.raises(UserCodeError) as caught:
        load(f"{path}:Task")
    text = format_user_traceback(caught.value)
    assert f'File "{path}", line 2' in text
    assert "SyntaxError" in text
    assert "importlib" not in text
    assert "Traceback" not in text  # as Python itself prints a syntax error of a script


def test_a_file_that_failed_is_tried_again(write):
    path = write("raise ValueError")
    with pytest.raises(UserCodeError):
        load(f"{path}:Good")
    path.write_text(textwrap.dedent(GOOD) + "\n# longer, so that no cached bytecode fits\n")
    assert load(f"{path}:Good").given == (64, 7, CPU)


def test_frames_of_torch_below_the_users_stay(write):
    path = write("import torch\nmodel = torch.nn.Linear(3, 1)\ndef loss():\n    return model(torch.ones(2, 5))\n")
    with pytest.raises(UserCodeError, match="shapes cannot be multiplied") as caught:
        call_as_paramserver(run(path)["loss"])
    shown = frames(format_user_traceback(caught.value))
    assert shown[0] == f'File "{path}", line 4, in loss'
    assert "torch" in shown[-1]
    assert not any(str(USER_CODE) in line or "in call" in line or "contextlib" in line for line in shown)


def test_frames_of_torch_above_the_users_go(write):
    class Data:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            raise KeyError(index)

    with pytest.raises(UserCodeError) as caught:
        call_as_paramserver(next, iter(DataLoader(Data())))
    shown = frames(format_user_traceback(caught.value))
    assert len(shown) == 1
    assert shown[0].endswith("in __getitem__")


def test_an_error_without_a_frame_of_the_users_begins_below_ours():
    loader = DataLoader([object()])  # torch cannot collate what the data set returns
    with pytest.raises(UserCodeError, match="default_collate") as caught:
        call_as_paramserver(next, iter(loader))
    shown = frames(format_user_traceback(caught.value))
    assert shown
    assert all("torch" in line for line in shown)


def test_an_error_in_a_built_in_task_shows_the_task():
    task = Linear(num_samples=4, num_features=3)
    with pytest.raises(UserCodeError) as caught:
        call_as_paramserver(task.loss, task.model(), (torch.ones(2, 5), torch.ones(2, 1)))
    assert "in loss" in frames(format_user_traceback(caught.value))[0]


def test_the_cause_of_an_exception_is_shown_with_it(write):
    path = write("def loss():\n  try: {}['weights']\n  except KeyError as error: raise RuntimeError('no') from error\n")
    with pytest.raises(UserCodeError) as caught:
        call_as_paramserver(run(path)["loss"])
    text = format_user_traceback(caught.value)
    assert "KeyError: 'weights'" in text
    assert "direct cause" in text
    assert len(frames(text)) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), UsageError("too long")])
def test_interrupts_and_errors_raised_on_purpose_pass_through(error):
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        call_as_paramserver(fail)
    assert caught.value is error


def test_nesting_wraps_once():
    original = ValueError("mine")

    def fail() -> None:
        raise original

    with pytest.raises(UserCodeError) as caught:
        call_as_paramserver(call_as_paramserver, fail)
    assert caught.value.original is original
