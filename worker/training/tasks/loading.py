"""Turns `task.name` and `task.args` into a task: a built-in one, or a class in a user's own file.

A mistake in the configuration is a UsageError. An exception in the user's own code becomes a UserCodeError. Its
traceback begins in the user's file, because our own frames do not help the user.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ....common.errors import UsageError, did_you_mean, shown
from ....common.registry import TASKS
from ....common.user_code import UserCodeError, is_in_file, load_from_file, user_code
from ...tasks.base import Task

# The methods of a task, called with these arguments.
_METHODS = {"model": (), "train_data": (), "loss": ("model", "batch"), "evaluate": ("model",)}
# Methods that other training loops call. A task does not use them.
_OTHERS = ("optimizer", "optimizers", "configure_optimizers")

_GIVE_IT_HERE = "give --task FILE.py:NAME, or the built-in task that is meant, to this worker"
# What a server may give: the largest number, the longest list, and the numbers of data and model together (4 GB).
_MOST, _MOST_ITEMS, _MOST_ELEMENTS = 2**31, 8, 2**30


def load_task(name: str, args: dict[str, Any], *, seed: int, device: torch.device) -> Task:
    """Construct the task `name` with `args`.

    It is a built-in task, or `FILE.py:NAME` (a class, or a function that returns a task).

    If it has parameters `seed` and `device` that are not in `args`, they are filled in. Raises UsageError.
    """
    make: Any = load_from_file("task", name) if is_in_file(name) else TASKS.load(name)
    if not callable(make):
        file, _, attribute = name.rpartition(":")
        message = f"{attribute!r} in {file} is of type {type(make).__name__}, not a class"
        raise UsageError(message, fix="name a class with the methods " + ", ".join(_METHODS))
    # The signature is read, so that a TypeError in the user's code is not reported as a wrong argument.
    parameters = inspect.signature(make).parameters.values()
    by_keyword = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for key in args:
            if key not in by_keyword:
                fix = did_you_mean(key, by_keyword) if by_keyword else f"{name} takes no arguments"
                raise UsageError(f"unknown task.args.{key} of task {name}", fix=fix)
    kwargs = {key: value for key, value in {"seed": seed, "device": device}.items() if key in by_keyword} | args
    missing = [key for key, p in by_keyword.items() if p.default is p.empty and key not in kwargs]
    if missing:
        message = f"task {name} needs task.args." + ", task.args.".join(missing)
        raise UsageError(message, fix=f"e.g. --set task.args.{missing[0]}=VALUE, or give the parameter a default")
    with user_code():
        task = make(**kwargs)
    _check_methods(name, task)
    return task


def load_named_by_server(
    name: str, args: dict[str, Any], own_args: dict[str, Any], *, seed: int, device: torch.device
) -> Task:
    """Load the built-in task `name` with `args`, both given by the server. The worker's `own_args` take precedence.

    Raises UsageError as `check_named_by_server` does.
    """
    check_named_by_server(name, args, own_args)
    try:
        return load_task(name, args | own_args, seed=seed, device=device)
    except UserCodeError as error:
        if not isinstance(error.original, (MemoryError, RuntimeError)):
            raise
        line = (str(error.original) or "no memory").splitlines()[0]
        raise UsageError(f"the server's arguments of task {name} are too large for this worker: {line}") from None


def check_named_by_server(name: str, args: dict[str, Any], own_args: dict[str, Any]) -> None:
    """Raises UsageError unless the server names a built-in task with numbers, booleans or lists of numbers.

    A server must not be able to run code or read a file on a worker.
    """
    if name not in TASKS.names():
        message = f"the server names the task {shown(name)!r}, which is no built-in task of this worker"
        raise UsageError(f"{message}; a file or module is never taken from a server", fix=_GIVE_IT_HERE)
    parameters = inspect.signature(TASKS.load(name)).parameters
    for key, value in args.items():
        if key not in parameters:
            message = f"the server gives task.args.{shown(key)}, which task {name} of this worker does not have"
            raise UsageError(message, fix=did_you_mean(key, parameters))
        if key not in own_args:
            _check_from_server(name, parameters[key], value)
    sizes = {key: parameter.default for key, parameter in parameters.items()} | args | own_args
    num_bytes = 4 * TASKS.load(name).num_elements(**sizes)
    if args.keys() - own_args and num_bytes > 4 * _MOST_ELEMENTS:
        given = ", ".join(f"{key}={shown(repr(value))}" for key, value in sorted(args.items()) if key not in own_args)
        message = f"the server's arguments of task {name} ({given}) ask for {num_bytes / 1e9:,.0f} GB of data and model"
        fix = f"give them here, if this worker has the memory: ps-worker --set task.args.{next(iter(args))}=VALUE"
        raise UsageError(f"{message}; a server may ask for {4 * _MOST_ELEMENTS / 1e9:.0f} GB", fix=fix)


def _check_from_server(name: str, parameter: inspect.Parameter, value: Any) -> None:
    """Raises UsageError unless `value` has the default's type and is not text, which could be a path."""
    default = parameter.default
    if value == default and type(value) is type(default):
        return
    message = f"the server gives task.args.{parameter.name} of task {name} as {shown(repr(value))}"
    if not isinstance(default, int | float | tuple):
        fix = f"give it here: ps-worker --set task.args.{parameter.name}=VALUE"
        raise UsageError(f"{message}, and a file or a device is never taken from a server", fix=fix)
    items, like = (value, default[0]) if isinstance(default, tuple) and isinstance(value, list) else ([value], default)
    kinds = (int, float) if type(like) is float else (type(like),)
    is_sound = len(items) <= _MOST_ITEMS and all(type(item) in kinds and abs(item) <= _MOST for item in items)
    if not is_sound:
        expected = {bool: "true or false", int: "a whole number", float: "a number"}.get(type(default), "a list")
        raise UsageError(f"{message}, where {expected} of at most {_MOST:,} is expected", fix=_GIVE_IT_HERE)


def _check_methods(name: str, task: Any) -> None:
    """Raises UsageError if `task` lacks a method, or has one with other parameters than a task's."""
    missing = [method for method in _METHODS if not callable(getattr(task, method, None))]
    if missing:
        raise UsageError(
            f"task {name} is an object of type {type(task).__name__} without {', '.join(missing)}",
            fix="a task has the methods model(), train_data(), loss(model, batch) and evaluate(model)",
        )
    for method in _OTHERS:
        if callable(getattr(task, method, None)):
            raise UsageError(
                f"task {name} has a method {method}(), which is never called: a task has one optimizer, which the "
                "run's settings name",
                fix="leave it out (--optimizer, --lr, optimizer.args); for several optimizers write a script with "
                "session.optimizers()",
            )
    for method, arguments in _METHODS.items():
        signature = inspect.signature(getattr(task, method))
        try:
            signature.bind(*arguments)
        except TypeError as error:
            message = f"task {name}: {method}{signature} cannot be called as {method}({', '.join(arguments)}): {error}"
            raise UsageError(
                message, fix="write the method with these parameters; additional parameters need defaults"
            ) from error
