"""Reads YAML: files, with the line of each mistake, and single values in a flag or an environment variable."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ..errors import UnknownNameError, UsageError
from .option import NOT_FINITE
from .plain import Plain, meant

_FINITE = "write a finite number, or leave the setting out; a default of none means no limit"


class _Loader(yaml.SafeLoader):
    """A loader of text, lists and mappings. A field's type decides how a value without quotes (`Plain`) is read."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (a class attribute in the base class too)
        "<": [("tag:yaml.org,2002:merge", re.compile("<<$"))],
        None: [("!plain", re.compile(""))],
    }
    yaml_constructors = {  # noqa: RUF012
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.endswith((":str", ":map", ":seq"))
    }


def _tagged(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    """Returns the value of `!!int 3`, a number, switch or null."""
    if isinstance(value := Plain(node.value).value(), str):
        raise yaml.constructor.ConstructorError(None, None, f"{value!r} is no {node.tag}", node.start_mark)
    return value


_Loader.add_constructor("!plain", lambda loader, node: Plain(node.value))
for _kind in ("int", "float", "bool", "null"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _tagged)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes all text."""


_Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


def scalar_text(value: Any) -> str:
    """Return the text that --set and the environment read back as `value`, with quotes only if they are needed."""
    if isinstance(value, str) and meant(scalar(value)) == value:
        return value
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=float("inf"), sort_keys=False)
    return text.removesuffix("...\n").rstrip("\n")  # "..." ends a document that is a bare scalar


def scalar(text: str) -> Any:
    """Return the YAML value in `text` with its plain parts, or the text itself if it is not valid YAML."""
    try:
        return yaml.load(text, Loader=_Loader) if text.strip() else Plain("")  # a SafeLoader
    except (yaml.YAMLError, ValueError):
        return text


def read_document(path: str, label: str, fix: str) -> yaml.Node | None:
    """Read a YAML file. `label` names its content in errors ("the hosts"). Raises UsageError."""
    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        message = f"cannot read {label} {path}: {error.strerror}"
        raise UsageError(message, fix="give the path of a YAML file; configs/ has examples") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text", fix=fix) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        began = getattr(error, "context_mark", None)
        since = f" ({getattr(error, 'context', '')}, from line {began.line + 1})" if began else ""
        message = f"{where}: not valid YAML: {getattr(error, 'problem', error)}{since}"
        fix = "one `name: value` a line, indented with spaces, every bracket and quote closed; see configs/"
        raise UsageError(message, fix=fix) from None
    _check_once(root, path, set())
    return root


def _check_once(node: yaml.Node | None, path: str, seen: set[int]) -> None:
    """Refuse a key that occurs twice in one mapping. YAML itself would silently take the last."""
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return
    seen.add(id(node))  # an alias repeats a node, and may be inside it
    lines: dict[str, int] = {}
    for entry in node.value:
        if isinstance(entry, tuple):
            key, entry = entry
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines and isinstance(key, yaml.ScalarNode):
                message = f"{path}:{line}: '{name}' is set already in {path}:{lines[name]}"
                raise UsageError(message, fix="remove one of the two lines")
            lines[name] = line
        _check_once(entry, path, seen)


def items(node: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node, int]]:
    """Yield (key, value, line) for each entry of a mapping."""
    for key, value in node.value:
        yield str(key.value), value, key.start_mark.line + 1


def built(node: yaml.Node, origin: str) -> Any:
    """Return the value of a YAML node. Raises UsageError, which begins with `origin`."""
    try:
        return _Loader("").construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{origin}: {getattr(error, 'problem', error)}") from None


def refusal(error: ValidationError, origins: Mapping[str, str], otherwise: str = "") -> UsageError:
    """Return one error with a line for each of the first five mistakes: the origin of the key, the key, the reason.

    `origins` maps dotted keys to their origin. `otherwise` is the origin of other keys.
    """
    lines, fixes = [], []
    for mistake in error.errors()[:5]:
        key = ".".join(str(part) for part in mistake["loc"])
        origin = next((o for k, o in origins.items() if key == k or key.startswith(k + ".")), otherwise)
        message = mistake["msg"].removeprefix("Value error, ")
        message = message[0].lower() + message[1:]
        got = "" if mistake["type"] in ("value_error", "missing") else f", got {meant(mistake['input'])!r}"
        if mistake["type"] == NOT_FINITE:
            fixes.append(_FINITE)
        if isinstance(cause := mistake.get("ctx", {}).get("error"), UnknownNameError):
            key = ""
            fixes.append(cause.fix)
        elif not mistake["loc"]:  # several settings contradict each other: name the source of each
            sources = [f"{name}: {source}" for name, source in origins.items() if name in message]
            got = f" ({', '.join(sources)})" if sources else ""
        lines.append(": ".join(part for part in (origin, key, message + got) if part))
    return UsageError("\n".join(lines), fix=fixes[0] if fixes else "")
