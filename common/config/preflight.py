"""Checks before torch is loaded and before any process starts, for mistakes that would fail a run seconds later.

These checks do not import torch and do not run the user's code. A check that cannot decide reports nothing: the program
that needs the file, the device or the address checks it again.
"""

from __future__ import annotations

import ast
import errno
import glob
import os
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import BindError, CheckpointError, UsageError, did_you_mean
from ..registry import TASKS
from ..user_code import is_in_file, split_name
from ..wire.json_text import read_json
from .addresses import split_address
from .sections.processes import CheckpointConfig

# ---- code ----------------------------------------------------------------------------------------
# Checks a task file without running it: whether it has the named class, with its four methods.
#
# The check accepts code that it cannot decide: a decorator, a base class from another file, a name that is bound
# twice.


METHODS = ("model", "train_data", "loss", "evaluate")
# A file that uses one of these may define names that do not appear in its source.
_DYNAMIC = {"globals", "locals", "vars", "exec", "setattr"}
_ANY_NAME = {"*", "__getattr__", "__getattribute__"}


def check_task(name: str, args: Mapping[str, Any]) -> None:
    """Raise UsageError for a task with no such file or class, no Python, missing methods or unknown arguments."""
    path, attribute = split_name("task", name) if is_in_file(name) else (TASKS.file(name), "ENTRY")
    source = _Source(_parsed(path, f"task {name}"))
    if source.is_dynamic:
        return
    if attribute not in source.bound:
        fix = did_you_mean(attribute, source.classes) if source.classes else "it defines no class: write one"
        raise UsageError(f"{path} defines no {attribute!r}", fix=fix)
    node = source.definition(attribute)
    members = source.members(node) if isinstance(node, ast.ClassDef) else None
    if members is not None and (missing := [method for method in METHODS if method not in members]):
        fix = "a task has the methods model(), train_data(), loss(model, batch) and evaluate(model)"
        raise UsageError(f"task {name}: class {node.name} has no {', '.join(missing)}", fix=fix)  # type: ignore[union-attr]
    if (known := _parameters(node)) is not None:
        for key in args:
            if key not in known:
                fix = did_you_mean(key, known) if known else f"{name} takes no arguments"
                raise UsageError(f"unknown task.args.{key} of task {name}", fix=fix)


def check_script(path: str) -> None:
    """Raise UsageError for a script that Python cannot read."""
    if path.endswith(".py"):
        _parsed(Path(path), f"script {path}")


def _parsed(path: Path, label: str) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except SyntaxError as error:
        at = f"{path}:{error.lineno}" if error.lineno else str(path)
        raise UsageError(f"{label}: {at}: SyntaxError: {error.msg}", fix="correct the file") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{label}: {path} cannot be read: {error}", fix="name a file of Python source") from None


class _Source:
    """A parsed module: how often each name is bound, and its classes and functions by name."""

    def __init__(self, tree: ast.Module) -> None:
        self.bound = _bound_in(tree)
        self.classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        outside = [node for node in tree.body if not isinstance(node, ast.ClassDef)]
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        self.is_dynamic = not _DYNAMIC.isdisjoint(used) or not _ANY_NAME.isdisjoint(_bound_in(*outside))
        self._defined: dict[str, ast.AST | None] = {}
        for node in tree.body:
            match node:
                case ast.ClassDef() | ast.FunctionDef():
                    self._defined[node.name] = node
                case ast.Assign([ast.Name(name)], ast.Name(value)):  # ENTRY = Digits
                    self._defined[name] = self.definition(value)

    def definition(self, name: str) -> ast.AST | None:
        """Return the class or function of that name, or None if the name may mean something else."""
        return self._defined.get(name) if self.bound[name] == 1 else None

    def members(self, node: ast.ClassDef, seen: frozenset[str] = frozenset()) -> set[str] | None:
        """Return the attribute names of the class's objects, or None if the source does not show them."""
        if node.keywords or node.decorator_list or node.name in seen:
            return None
        found = set(_bound_in(node))
        for base in node.bases:
            name = base.id if isinstance(base, ast.Name) else ""
            if name == "object" and name not in self.bound:
                continue
            parent = self.definition(name)
            inherited = self.members(parent, seen | {node.name}) if isinstance(parent, ast.ClassDef) else None
            if inherited is None:
                return None
            found |= inherited
        return found if found.isdisjoint(_ANY_NAME) else None


def _bound_in(*nodes: ast.AST) -> Counter[str]:
    """Count how often each name is bound anywhere in the nodes, as a name or as an attribute."""
    found: Counter[str] = Counter()
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found[name] += 1
            case ast.Name(name, ast.Store()) | ast.Attribute(_, name, ast.Store()):
                found[name] += 1
            case ast.alias(name, None):
                found[name.partition(".")[0]] += 1
            case ast.alias(_, str(name)):
                found[name] += 1
    return found


def _parameters(node: ast.AST | None) -> list[str] | None:
    """Return the parameters of the call that makes the task, or None if it may accept any."""
    make, is_class = node, isinstance(node, ast.ClassDef)
    if isinstance(node, ast.ClassDef):
        bound = _bound_in(*node.body)
        if bound["__new__"] or node.decorator_list or node.keywords or (node.bases and not bound["__init__"]):
            return None
        if not bound["__init__"]:
            return []
        make = next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    if not isinstance(make, ast.FunctionDef) or make.args.kwarg is not None or make.decorator_list:
        return None
    return [argument.arg for argument in (*make.args.args[is_class:], *make.args.kwonlyargs)]


# ---- machine -------------------------------------------------------------------------------------
# Checks of this machine: its device, its addresses, the optimizers of its torch, and a file of initial weights.


# Files of the drivers of NVIDIA (also on Jetson), AMD and WSL 2.
_DRIVERS = ("/dev/nvidia*", "/proc/driver/nvidia/gpus/*", "/dev/nvhost*", "/dev/nvmap", "/dev/kfd", "/dev/dxg")
# A process that was just killed may still have the port, until the kernel has ended it.
_WAIT_S, _AGAIN_S = 1.0, 0.05
OUR_OPTIMIZERS = ("delayednesterov", "onebitadam")
_MOST_HEADER_BYTES = 100_000_000  # the limit of safetensors


def check_device(name: str) -> None:
    """Raise UsageError if this machine cannot have the CUDA device. torch.cuda checks again once torch is loaded."""
    if not name.startswith("cuda"):
        return
    versions = re.findall(r"^(?:cuda|hip|rocm)\b[^=\n]*=\s*(.*)$", _torch_source("version.py"), re.MULTILINE)
    if versions and all(value.strip() == "None" for value in versions):
        why = "its torch is built without CUDA"
    elif os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        why = "CUDA_VISIBLE_DEVICES hides all"
    elif any(glob.glob(pattern) for pattern in _DRIVERS):
        return
    else:
        why = "there is no driver of a GPU"
    raise UsageError(f"--device {name}: this machine has 0 CUDA devices: {why}", fix="use --device auto or cpu")


def _torch_source(file: str) -> str:
    """Return the text of a file of torch, without importing torch. It is empty if the file cannot be read."""
    spec = find_spec("torch")
    with suppress(OSError, ValueError, TypeError):  # TypeError: torch is not installed, or is no package
        return (Path(spec.submodule_search_locations[0]) / file).read_text()  # type: ignore[union-attr, index]
    return ""


def check_listening(address: str, key: str) -> None:
    """Raise BindError if no process can listen at HOST:PORT, the value of the setting `key`."""
    host, port = split_address(address)
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        why = f"host {host!r} is not known here ({error.strerror})"
        fix = "name an address of this machine, such as 127.0.0.1"
        raise BindError(f"{key}: cannot listen on {address}: {why}", fix=fix) from None
    deadline = time.monotonic() + _WAIT_S
    while True:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
            try:
                probe.bind(where)
                return
            except OSError as error:
                why, fix = str(error.strerror), "name an address of this machine"
                if error.errno == errno.EADDRINUSE:
                    why = f"port {port} is in use on this machine"
                    fix = "stop the other process, or choose another port (0 takes a free one)"
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise BindError(f"{key}: cannot listen on {address}: {why}", fix=fix) from None
        time.sleep(_AGAIN_S)


def check_weights(path: str) -> None:
    """Raise UsageError for an --init file that is missing, or whose header is not a safetensors header."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
            header = file.read(length) if length <= min(size - 8, _MOST_HEADER_BYTES) else b""
    except OSError as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        fix = "copy the file to this path on every worker's machine"
        raise UsageError(f"--init {path}: cannot be read: {why}", fix=fix) from None
    why, num_bytes = "it does not begin with a header", size - 8 - length
    with suppress(ValueError, TypeError, KeyError, IndexError, AttributeError):
        tensors = read_json(header)
        ends = [int(tensor["data_offsets"][1]) for name, tensor in tensors.items() if name != "__metadata__"]
        if (end := max(ends, default=0)) == num_bytes:
            return
        why = f"its header declares {end:,} bytes of tensors; the file has {num_bytes:,}"
    raise UsageError(f"--init {path}: is no safetensors file: {why}", fix="name a file that --save has written")


def check_resume(checkpoint: CheckpointConfig) -> None:
    """Raise CheckpointError if the place to resume from does not exist. A server looks for the snapshots in it."""
    directory = checkpoint.dir if checkpoint.resume == "latest" else checkpoint.resume
    if checkpoint.resume not in (None, "never") and not Path(directory or "").exists():
        raise no_snapshot(directory, checkpoint.resume)


def no_snapshot(directory: str | None, resume: str | None) -> CheckpointError:
    """Return the error of a directory without a snapshot."""
    problem = f"there is no snapshot in {directory} to resume from (checkpoint.resume is {resume})"
    fix = "name a directory that ps-server --checkpoint-dir wrote to, or start a new run without --resume"
    return CheckpointError(problem, fix=fix)


def check_optimizer(name: str) -> None:
    """Raise UsageError for an optimizer that torch.optim does not have."""
    if (known := optimizer_names()) and name.lower() not in known:
        raise UsageError(f"unknown optimizer '{name}'", fix=did_you_mean(name.lower(), known))


def optimizer_names() -> list[str]:
    """Return the optimizers of torch.optim and ours in lower case. The list is empty if torch's file is unreadable."""
    try:
        tree = ast.parse(_torch_source("optim/__init__.py"))
    except (SyntaxError, ValueError):
        return []
    names = [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    classes = [name.lower() for name in names if name[:1].isupper() and name != "Optimizer"]
    return sorted({*classes, *OUR_OPTIMIZERS}) if classes and "*" not in names else []
