"""Checks a task file without running it: whether it has the named class, with its four methods.

The check accepts code that it cannot decide: a decorator, a base class from another file, a name that is bound twice.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import UsageError, did_you_mean
from ...registry import TASKS
from ...user_code import is_in_file, split_name

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
