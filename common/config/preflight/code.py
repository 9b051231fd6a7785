"""The user's code, read but not run: a task file has the class that was named, with the four methods."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import UsageError, did_you_mean
from ...registry import TASKS
from ...user_code import is_in_file, split_name

METHODS = ("model", "train_data", "loss", "evaluate")
# A file that uses one of these may define names that reading does not find.
_DYNAMIC = {"globals", "locals", "vars", "exec", "setattr"}


def check_task(name: str, args: Mapping[str, Any]) -> None:
    """Raise UsageError for a task that cannot be: no such file or class, no Python, missing methods, unknown
    arguments."""
    if is_in_file(name):
        path, attribute = split_name("task", name)
        defined = _Defined(_parsed(path, f"task {name}"))
        if attribute not in defined.names and not defined.is_dynamic:
            classes = [name for name, node in defined.names.items() if node is not None]
            fix = did_you_mean(attribute, classes) if classes else "it defines no class: write one"
            raise UsageError(f"{path} defines no {attribute!r}", fix=fix)
    else:
        path, attribute = TASKS.file(name), "ENTRY"
        defined = _Defined(_parsed(path, f"task {name}"))
    node = defined.names.get(attribute)
    if defined.is_dynamic or node is None:
        return
    members = defined.members(node) if isinstance(node, ast.ClassDef) else None
    if members is not None and (missing := [method for method in METHODS if method not in members]):
        raise UsageError(
            f"task {name}: class {node.name} has no {', '.join(missing)}",
            fix="a task has the methods model(), train_data(), loss(model, batch) and evaluate(model)",
        )
    if (known := _parameters(node)) is not None:
        for key in args:
            if key not in known:
                fix = did_you_mean(key, known) if known else f"{name} takes no arguments"
                raise UsageError(f"unknown task.args.{key} of task {name}", fix=fix)


def check_script(path: str) -> None:
    """Raise UsageError for a script that Python cannot read."""
    if path.endswith(".py"):
        _parsed(Path(path), f"script {path}")


def _parsed(path: Path, what: str) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except SyntaxError as error:
        at = f"{path}:{error.lineno}" if error.lineno else str(path)
        raise UsageError(f"{what}: {at}: SyntaxError: {error.msg}", fix="correct the file") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{what}: {path} cannot be read: {error}", fix="name a file of Python source") from None


class _Defined:
    """What a module defines at its top level: names, with the class or function where it is one."""

    def __init__(self, tree: ast.Module) -> None:
        bound = list(_bound(tree.body))
        self.names: dict[str, ast.ClassDef | ast.FunctionDef | None] = {}
        for name, node in bound:
            if isinstance(node, ast.Name):  # ENTRY = Digits
                node = self.names.get(node.id)
            self.names[name] = node if isinstance(node, ast.ClassDef | ast.FunctionDef) else None
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        self.is_dynamic = bool(_DYNAMIC & used) or not {"*", "__getattr__"}.isdisjoint(self.names)

    def members(self, node: ast.ClassDef, seen: frozenset[str] = frozenset()) -> set[str] | None:
        """What objects of the class have; None where reading cannot tell (bases and decorators from elsewhere)."""
        if node.keywords or node.decorator_list or node.name in seen:
            return None
        found = {name for name, _ in _bound(node.body)}
        found |= {
            one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)
        }
        for base in node.bases:
            its = self.names.get(base.id) if isinstance(base, ast.Name) else None
            if isinstance(base, ast.Name) and base.id == "object" and base.id not in self.names:
                continue
            inherited = self.members(its, seen | {node.name}) if isinstance(its, ast.ClassDef) else None
            if inherited is None:
                return None
            found |= inherited
        return None if found & {"*", "__getattr__", "__getattribute__"} else found


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST | None]]:
    """Names that statements bind, in order, also within `if`, `try` and the like."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], None
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                is_alias = isinstance(node, ast.Assign) and isinstance(target, ast.Name)
                for one in ast.walk(target):
                    if isinstance(one, ast.Name):
                        yield one.id, node.value if is_alias else None
        else:
            for one in ast.walk(node):
                if isinstance(one, ast.NamedExpr):
                    yield one.target.id, None
            for part in ("body", "orelse", "finalbody"):
                yield from _bound(getattr(node, part, []))
            for one in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
                yield from _bound(one.body)
            targets = [getattr(node, "target", None), *(one.optional_vars for one in getattr(node, "items", []))]
            for one in (inner for target in targets if target is not None for inner in ast.walk(target)):
                if isinstance(one, ast.Name):
                    yield one.id, None


def _parameters(node: ast.ClassDef | ast.FunctionDef) -> list[str] | None:
    """Of the call that makes the task; None where any key may be one."""
    make: ast.AST | None = node
    if isinstance(node, ast.ClassDef):
        own = dict(_bound(node.body))
        if "__new__" in own or node.decorator_list or node.keywords or ("__init__" not in own and node.bases):
            return None
        if "__init__" not in own:
            return []
        make = own["__init__"]
    if not isinstance(make, ast.FunctionDef) or make.args.kwarg is not None or make.decorator_list:
        return None
    named = [one.arg for one in (*make.args.args, *make.args.kwonlyargs)]
    return named[1:] if isinstance(node, ast.ClassDef) else named
