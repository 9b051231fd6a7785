"""Turns `task.name` and `task.args` into a task: a built-in one, or a class in a user's own file.

A mistake in the configuration is a UsageError. An exception of the user's own code becomes a
UserCodeError, whose traceback begins in the user's file: what is ours above it helps nobody.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch

from ...common.errors import ParamServerError, UsageError, did_you_mean
from ...common.registry import TASKS
from ..tasks.base import Task

# The methods of a task, called with these arguments.
_METHODS = {"model": (), "train_data": (), "loss": ("model", "batch"), "evaluate": ("model",)}


class UserCodeError(Exception):
    """An exception of the user's own code; `original` is it. `format_user_traceback` shows where it arose."""

    def __init__(self, original: Exception) -> None:
        super().__init__(f"{type(original).__name__}: {original}")
        self.original = original


@contextmanager
def user_code() -> Iterator[None]:
    """Around every call of a task: its exceptions become UserCodeError, except the errors raised on purpose.

    KeyboardInterrupt, SystemExit, ParamServerError and UserCodeError pass through.
    """
    try:
        yield
    except (ParamServerError, UserCodeError):
        raise
    except Exception as error:
        raise UserCodeError(error) from error


def load_task(name: str, args: dict[str, Any], *, seed: int, device: torch.device) -> Task:
    """The task `name`, a built-in one or `FILE.py:NAME`, constructed with `args`.

    NAME is a class or a function that returns a task. Parameters called `seed` and `device` are
    filled in where `args` does not. Raises UsageError for what the user can correct in the
    configuration and UserCodeError for what the user's code raises.
    """
    make = _from_file(name) if ".py:" in name else TASKS.load(name)
    kwargs = _arguments(name, make, args, {"seed": seed, "device": device})
    with user_code():
        task = make(**kwargs)
    _check_methods(name, task)
    return task


def format_user_traceback(error: UserCodeError | Exception) -> str:
    """The traceback as Python prints it, from the first frame of the user's on; frames below stay."""
    original = error.original if isinstance(error, UserCodeError) else error
    shown = _from_first(original.__traceback__, _is_users)
    if shown is None:  # e.g. torch's collate function, given what the user's data set returned
        shown = _from_first(original.__traceback__, lambda module: not _is_machinery(module))
    if shown is None:  # e.g. a syntax error: Python could not run a line of the file
        return "".join(traceback.format_exception_only(original))
    return "".join(traceback.format_exception(type(original), original, shown))


def _from_first(trace: TracebackType | None, wanted: Callable[[str], bool]) -> TracebackType | None:
    while trace is not None and not wanted(trace.tb_frame.f_globals.get("__name__", "")):
        trace = trace.tb_next
    return trace


def _is_users(module: str) -> bool:
    """Whether a frame of `module` is where the reader should begin; for a built-in task that is its file."""
    return not _is_machinery(module) and module.partition(".")[0] != "torch"


def _is_machinery(module: str) -> bool:
    """By module name, not by path: a user's file may well lie in a checkout of ours."""
    if module.startswith("paramserver.worker.tasks."):
        return False
    return module.partition(".")[0] in {"paramserver", "importlib"}


def _from_file(name: str) -> Callable[..., Any]:
    """The class or function of `FILE.py:NAME`."""
    file, _, attribute = name.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise UsageError(
            f"task.name is {name!r}: no file {path}",
            fix="the path is relative to the working directory; the form is FILE.py:NAME",
        )
    module = _import(path)
    if attribute not in vars(module):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        fix = did_you_mean(attribute, own) if own else "it defines no class: write one"
        raise UsageError(f"{path} defines no {attribute!r}", fix=fix)
    make: Any = getattr(module, attribute)
    if not callable(make):
        raise UsageError(
            f"{attribute!r} in {path} is of type {type(make).__name__}, not a class",
            fix="name a class with the methods " + ", ".join(_METHODS),
        )
    return make


def _import(path: Path) -> ModuleType:
    """Run the file at `path` once per process and return it as a module."""
    folder = str(path.parent)
    if folder not in sys.path:  # as `python FILE.py` does, so that the file can import its neighbours
        sys.path.insert(0, folder)
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before the file runs: dataclasses and pickle look their module up
    try:
        with user_code():
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module_name(path: Path) -> str:
    """The file's stem where `import STEM` means this very file, otherwise a name that nothing else has.

    The stem lets a DataLoader worker started by spawn, which gets our sys.path but not our
    modules, unpickle objects of the file. A file called e.g. random.py must not take the place
    of the real one.
    """
    stem = path.stem
    loaded = sys.modules.get(stem)
    if loaded is None:
        spec = importlib.util.find_spec(stem) if stem.isidentifier() else None
        origin = spec.origin if spec else None
    else:
        origin = getattr(loaded, "__file__", None)
    if origin is not None and Path(origin).resolve() == path:
        return stem
    return f"{stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"


def _arguments(name: str, make: Callable[..., Any], args: dict[str, Any], offered: dict[str, Any]) -> dict[str, Any]:
    """`args`, plus those of `offered` that `make` has a parameter for. Decided by the signature,
    so that a TypeError inside the user's code is not mistaken for a wrong argument.
    """
    parameters = inspect.signature(make).parameters.values()
    by_keyword = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for key in args:
            if key not in by_keyword:
                fix = did_you_mean(key, by_keyword) if by_keyword else f"{name} takes no arguments"
                raise UsageError(f"unknown task.args.{key} of task {name}", fix=fix)
    kwargs = {key: value for key, value in offered.items() if key in by_keyword} | args
    missing = [key for key, p in by_keyword.items() if p.default is p.empty and key not in kwargs]
    if missing:
        raise UsageError(
            f"task {name} needs task.args." + ", task.args.".join(missing),
            fix=f"e.g. --set task.args.{missing[0]}=VALUE, or give the parameter a default",
        )
    return kwargs


def _check_methods(name: str, task: Any) -> None:
    """UsageError if `task` lacks a method of a task, or has one that cannot be called as we will call it."""
    missing = [method for method in _METHODS if not callable(getattr(task, method, None))]
    if missing:
        raise UsageError(
            f"task {name} is an object of type {type(task).__name__} without {', '.join(missing)}",
            fix="a task has the methods model(), train_data(), loss(model, batch) and evaluate(model)",
        )
    for method, arguments in _METHODS.items():
        signature = inspect.signature(getattr(task, method))
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise UsageError(
                f"task {name}: {method}{signature} cannot be called as {method}({', '.join(arguments)}): {error}",
                fix="write the method with these parameters; more of them need defaults",
            ) from error
