"""Reads settings from all sources, with the origin of each value, also from YAML.

flag > `PS_SECTION__KEY` environment > YAML > launcher environment (RANK, ...) > default

`PS_SERVER` is short for `PS_WORKER__SERVER`, which wins over it. `launchers.py` reads the launcher environment, for
workers only.

`load_config` merges the sources into one dict, remembers the origin of every value, and validates the result once. An
error names the key, its origin (file:line, the flag, the variable) and the nearest known key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import ValidationError

from .. import synonyms
from ..errors import UnknownNameError, UsageError, did_you_mean
from ..registry import canonical_mode
from ..user_code import is_in_file
from .flags import flag_name, sections, settings
from .launchers import RANK_VARIABLES, engine_settings
from .option import NOT_FINITE
from .plain import Plain, meant, types_in
from .schema import Config, OptimizerConfig, mode_options

_SHORT_NAMES = {"PS_SERVER": "worker.server"}
# Two settings for the length of a run: the setting from the stronger source replaces the other.
_INSTEAD = {"run.steps": "run.epochs", "run.epochs": "run.steps"}
_MAX_SHOWN = 100  # characters of a value in a message
# Variables of a process's own rank. A launcher does not pass them to its children.
LAUNCHER_ENV_NAMES = RANK_VARIABLES | _SHORT_NAMES.keys()


@dataclass
class Resolved:
    """A validated configuration, and the origin of each value that was set."""

    config: Config
    origins: dict[str, str] = field(default_factory=dict)  # dotted key -> "flag --lr", "run.yaml:7", ...

    def was_set(self, key: str) -> bool:
        """Whether any source set `key`."""
        return key in self.origins

    def check_options(self, modes: Iterable[str], also: str = "flag ") -> None:
        """Refuse options that would have no effect in a run of `modes`. Raises UsageError.

        A flag must be an option of at least one mode in `modes`. An option from a source that begins with `also` must
        be read by a mode in `modes`.
        """
        modes = list(modes)
        for key in self.unread(modes):
            if self.origins[key].startswith(("flag ", also)):
                message = f"{self.origins[key]}: mode {' and '.join(modes)} has no such option"
                readers = ", ".join(_readers(key, self.config.run.modes))
                fix = f"leave it out, or use a mode that has it: {readers}"
                raise UsageError(f"{message}, so it would have no effect", fix=fix)

    def unread(self, modes: Iterable[str]) -> list[str]:
        """Return the options that were set, but that none of `modes` reads."""
        active = {*modes}
        found = {key: _readers(key, self.config.run.modes) for key in self.origins}
        return [key for key, readers in found.items() if readers and not {*readers} & active]

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (key, value, origin) of every setting, for --print-config."""
        known = settings(self.config.run.modes)
        rows = []
        for section, body in self.config:
            of_section = {key: info for key, info in known.items() if key.startswith(f"{section}.")}
            values = {key: info.get_default(call_default_factory=True) for key, info in of_section.items()}
            for key, value in (values | {f"{section}.{name}": value for name, value in body}).items():
                # One source may have set a whole dict, and others single keys of it.
                found = [origin for name, origin in self.origins.items() if name == key or name.startswith(f"{key}.")]
                shown = ",".join(value) if isinstance(value, tuple) and value else str(value)
                rows.append((key, shown, ", ".join(dict.fromkeys(found)) or "default"))
        return rows


def _readers(key: str, modes: Iterable[str]) -> list[str]:
    """Return the modes that have this option, or an empty list for a setting of every mode."""
    section, _, name = key.partition(".")
    found = mode_options(modes).items() if section == "policy" else ()
    return [mode for mode, options in found if name in options.model_fields]


def of_mode(mode: str, flags: Mapping[str, Any], sets: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the flags and the `sets` without options that only other modes have."""

    def is_its(key: str) -> bool:
        readers = _readers(key.strip(), [mode])
        return not readers or mode in readers

    of_flags = {key: value for key, value in flags.items() if is_its(key)}
    return of_flags, [text for text in sets if is_its(text.partition("=")[0])]


def load_config(
    path: str | None,
    flags: Mapping[str, Any],
    sets: list[str],
    environ: Mapping[str, str],
    *,
    is_worker: bool = True,
    defaults: Mapping[str, tuple[Any, str]] = MappingProxyType({}),
    overrides: Mapping[str, tuple[Any, str]] = MappingProxyType({}),
) -> Resolved:
    """Merge and validate all sources.

    `flags` maps dotted keys to values, None for a flag that was not given. `sets` are the `section.key=value` texts
    of --set. Only a worker (`is_worker`) reads its rank from RANK or SLURM_PROCID. `defaults` and `overrides` map
    dotted keys to a program's own values and their origins; the ones are weaker, the others stronger than all sources,
    and None is a value there. Raises UsageError.
    """
    entries: list[tuple[str, Any, str]] = []  # key, value, origin; a later entry wins
    if path is not None:
        entries += [(key, value, f"{path}:{line}") for key, value, line in _read_file(path)]
    variables = {name: key for name, key in _SHORT_NAMES.items() if environ.get(name)}
    long_names = [name for name in sorted(environ) if name.startswith("PS_") and "__" in name]
    variables |= {name: name[3:].lower().replace("__", ".") for name in long_names}
    entries += [(key, scalar(environ[name]), f"environment {name}") for name, key in variables.items()]
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or "." not in key:
            raise UsageError(f"--set {text}: not of the form section.key=value", fix="e.g. --set policy.staleness=2")
        entries.append((key.strip(), scalar(value), f"--set {key.strip()}"))
    entries += [(key, value, "flag") for key, value in flags.items() if value is not None]
    if is_worker:  # the rank of a replica group comes from an outer engine
        is_group = meant(next((value for key, value, _ in reversed(entries) if key == "worker.group"), False)) is True
        of_engine = engine_settings(environ, is_group).settings
        weakest = [(key, Plain(found.value), f"environment {found.name}") for key, found in of_engine.items()]
        entries = [*weakest, *entries]
    weaker, stronger = ([(key, *found) for key, found in values.items()] for values in (defaults, overrides))
    return _validated([*weaker, *entries, *stronger])


def _check_text(value: Any, origin: str) -> None:
    """Raises UsageError for a path whose bytes are not UTF-8. Snapshots and records could not name it."""
    text = str(value)
    if any("\udc80" <= character <= "\udcff" for character in text):
        shown = text.encode("utf-8", "backslashreplace").decode()
        raise UsageError(f"{origin}: {shown} is not UTF-8", fix="rename the file or folder, or give a relative path")


def _validated(entries: list[tuple[str, Any, str]]) -> Resolved:
    """Returns the configuration that the (key, value, origin) entries make. Later entries win."""
    mode, others = modes_in_files(entries)
    known = settings([mode, *others] if mode else others)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, value, origin in entries:
        if origin == "flag":
            origin = f"flag {flag_name(key, known[key])}"
            if isinstance(value, str) and str not in types_in(known[key].annotation):
                value = Plain(value)
        _check_key(key, origin, known)
        _check_text(value, origin)
        _put(values, key, value, origin)
        origins[key] = origin
        other = _INSTEAD.get(key)
        if other in origins and meant(value) is not None and _kind(origins[other]) != _kind(origin):
            _put(values, other, None, origin)
            del origins[other]
    if others:
        _put(values, "run.other_modes", others, "")
        origins.setdefault("run.other_modes", origins.get("run.mode", ""))
    try:
        return Resolved(Config.model_validate(values), origins)
    except ValidationError as error:
        raise refusal(error, origins) from None


def _kind(origin: str) -> str:
    """Returns the kind of an origin: flag, --set, environment, or the file's name."""
    return origin.partition(" ")[0].partition(":")[0]


def _put(values: dict[str, Any], key: str, value: Any, origin: str) -> None:
    """Set the value at a dotted key of nested dicts."""
    section, _, rest = key.partition(".")
    target = values.setdefault(section, {})
    *parents, last = rest.split(".")
    for parent in parents:
        target = target.setdefault(parent, {})
        if not isinstance(target, dict):
            raise UsageError(f"{origin}: nothing can be set below '{key.rpartition('.')[0]}', which is a value")
    target[last] = value


def modes_in_files(entries: list[tuple[str, Any, str]]) -> tuple[str, list[str]]:
    """Return the run's mode if it is in a file, and other modes in files that any source names.

    The options of the other modes stay known, so that a configuration file may keep options of a mode that a flag
    replaced. Raises UsageError for a file that does not have its mode.
    """
    run, others = "", dict[str, None]()
    for key, value, origin in entries:
        try:
            if key == "run.mode" and isinstance(value, str):
                run = canonical_mode(value) if is_in_file(value) else ""
                others |= {run: None} if run else {}
            elif key == "run.other_modes" and isinstance(value, list | tuple):
                others |= {canonical_mode(mode): None for mode in value if is_in_file(str(mode))}
            mode_options(others)
        except UsageError as error:
            source = "flag --mode" if origin == "flag" else origin
            raise UsageError(f"{source}: {error.message}", fix=error.fix) from None
    return run, [mode for mode in others if mode != run]


def _read_file(path: str) -> list[tuple[str, Any, int]]:
    """Return (dotted key, value, line) for every `section: {key: value}` of the file."""
    root = read_document(path, "the configuration", "a configuration is a YAML file, see configs/")
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path}:1: expected sections such as 'run:' and 'task:'", fix="see configs/digits.yaml")
    found: list[tuple[str, Any, int]] = []
    for section, body, line in items(root):
        _check_section(section, f"{path}:{line}", settings())
        if isinstance(body, yaml.MappingNode):
            keys = [(f"{section}.{key}", value, at) for key, value, at in items(body)]
            found += [(key, built(value, f"{path}:{at}: {key}"), at) for key, value, at in keys]
        elif not isinstance(body, yaml.ScalarNode) or body.value:
            raise UsageError(f"{path}:{line}: '{section}' is a section, not a value")
    return found


def _check_section(section: str, origin: str, known: Iterable[str]) -> None:
    """Refuse an unknown section with the nearest known one, or the key that was meant."""
    if section not in sections():
        same_leaf = [key for key in known if key.endswith(f".{section}")]
        fix = f"did you mean '{same_leaf[0]}'?" if same_leaf else did_you_mean(section, sections())
        raise UsageError(f"{origin}: unknown section '{section}'", fix=fix)


def _check_key(key: str, origin: str, known: Iterable[str]) -> None:
    """Refuse an unknown section or key with the nearest known one, looked for in every section."""
    section, _, rest = key.partition(".")
    _check_section(section, origin, known)
    name = rest.partition(".")[0]
    if name and f"{section}.{name}" not in known and sections()[section] is not OptimizerConfig:
        others = [key for key in known if key.endswith(f".{name}")]
        near = [key.removeprefix(f"{section}.") for key in known if key.startswith(f"{section}.")]
        fix = f"did you mean '{others[0]}'?" if others else did_you_mean(name, near, f"{section}.")
        if (why := synonyms.DROPPED_SETTINGS.get(key)) is not None:
            raise UsageError(f"{origin}: {key} was removed", fix=why)
        raise UsageError(f"{origin}: unknown key '{section}.{name}'", fix=fix)


# ---- documents -----------------------------------------------------------------------------------
# Reads YAML: files, with the line of each mistake, and single values in a flag or an environment variable.


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
for _plain_tag in ("int", "float", "bool", "null"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_plain_tag}", _tagged)


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
        value = " ".join(repr(meant(mistake["input"])).split())[:_MAX_SHOWN]
        got = "" if mistake["type"] in ("value_error", "missing") else f", got {value}"
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
