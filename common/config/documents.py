"""YAML as people mean it: files whose mistakes are told with their line, and values in a flag or a variable."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ..errors import UnknownNameError, UsageError
from .option import NOT_FINITE

_FINITE = "write a finite number, or leave the setting out: its default, where that is none, is no limit"


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: 1e-3 is a number (1.1 reads a string), a date is text, and so is what is quoted."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (a class attribute in the base class too)
        first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith((":timestamp", ":float"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?"
        r"|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would read as something else."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def scalar_text(value: Any) -> str:
    """The text that --set and the environment read back as `value`: bare where that is enough."""
    if isinstance(value, str) and scalar(value) == value:
        return value
    style = '"' if isinstance(value, str) else None
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, default_style=style, width=float("inf"), sort_keys=False
    )
    return text.removesuffix("...\n").rstrip("\n")  # "..." ends a document that is a bare scalar


def scalar(text: str) -> Any:
    """A YAML scalar or flow value; the text itself when it is not valid YAML."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError):
        return text


def read_document(path: str, label: str, fix: str) -> yaml.Node | None:
    """Reads the file of `label` ("the hosts"). Raises UsageError."""
    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise UsageError(f"cannot read {label} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text", fix=fix) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        began = getattr(error, "context_mark", None)
        since = f" ({getattr(error, 'context', '')}, from line {began.line + 1})" if began else ""
        raise UsageError(
            f"{where}: not valid YAML: {getattr(error, 'problem', error)}{since}",
            fix="one `name: value` a line, indented with spaces, every bracket and quote closed; see configs/",
        ) from None
    _check_once(root, path, set())
    return root


def _check_once(node: yaml.Node | None, path: str, seen: set[int]) -> None:
    """Refuse a key that stands twice in one mapping: YAML would take the last, and say nothing."""
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return
    seen.add(id(node))  # what an alias names is there once, and may be inside itself
    lines: dict[str, int] = {}
    for entry in node.value:
        if isinstance(entry, tuple):
            key, entry = entry
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines and isinstance(key, yaml.ScalarNode):
                raise UsageError(
                    f"{path}:{line}: '{name}' is set already in {path}:{lines[name]}", fix="leave one of them out"
                )
            lines[name] = line
        _check_once(entry, path, seen)


def items(node: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node, int]]:
    """Each key with what it holds and its line."""
    for key, value in node.value:
        yield str(key.value), value, key.start_mark.line + 1


def built(node: yaml.Node, origin: str) -> Any:
    """The value that the node means. Raises UsageError."""
    try:
        return _Loader("").construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{origin}: {getattr(error, 'problem', error)}") from None


def refusal(error: ValidationError, origins: Mapping[str, str], otherwise: str = "") -> UsageError:
    """One error with a line for each of the first mistakes: the origin of its key, the key, the reason.

    `otherwise`: the origin of keys that `origins` does not have.
    """
    lines, fixes = [], []
    for mistake in error.errors()[:5]:
        key = ".".join(str(part) for part in mistake["loc"])
        origin = next((o for k, o in origins.items() if key == k or key.startswith(k + ".")), otherwise)
        message = mistake["msg"].removeprefix("Value error, ")
        message = message[0].lower() + message[1:]
        got = "" if mistake["type"] in ("value_error", "missing") else f", got {mistake['input']!r}"
        if mistake["type"] == NOT_FINITE:
            fixes.append(_FINITE)
        if isinstance(cause := mistake.get("ctx", {}).get("error"), UnknownNameError):
            key = ""
            fixes.append(cause.fix)
        elif not mistake["loc"]:  # several settings that do not go together: name the source of each
            sources = [f"{name}: {source}" for name, source in origins.items() if name in message]
            got = f" ({', '.join(sources)})" if sources else ""
        lines.append(": ".join(part for part in (origin, key, message + got) if part))
    return UsageError("\n".join(lines), fix=fixes[0] if fixes else "")
