"""Finds the implementations of a family by their files: one file, one name.

A mode, a codec, a task or a launch backend is one file in its folder; its name is the
file's stem (a trailing underscore is dropped, so that `async_.py` may be called async).
The file defines one public class named in `ENTRY`. Names can be listed without importing
anything, which is how the launcher refuses an unknown mode without loading torch.

A mode may also be a class in a user's own file, by the name `FILE.py:NAME` (tasks too, see
`worker/training/tasks/loading.py`). Such a name comes only from the command line or configuration
of the same process. A name from another process would let that process run code here.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from . import synonyms
from .errors import UnknownNameError, UsageError, did_you_mean
from .user_code import UserCodeError, is_in_file, line_of, load_from_file, split_name


@dataclass(eq=False)
class Family:
    """The implementations found in one package, e.g. `Family("paramserver.ps.policies", "mode")`.

    Files whose name is in `support` have shared code, not an implementation. `base` names a class of the package's
    `base.py`: a user's class that extends it is an implementation too, named `FILE.py:NAME`. `others` are further
    packages with implementations.
    """

    package: str
    noun: str
    support: frozenset[str] = frozenset()
    base: str = ""
    others: tuple[str, ...] = ()

    @cached_property
    def _modules(self) -> dict[str, str]:
        found = {}
        for package in (self.package, *self.others):
            spec = importlib.util.find_spec(package)
            if spec is None or spec.submodule_search_locations is None:
                raise ModuleNotFoundError(f"no package {package}")
            stems = (info.name for info in pkgutil.iter_modules(spec.submodule_search_locations))
            found.update({stem.rstrip("_"): f"{package}.{stem}" for stem in stems if stem not in self.support})
        return found

    def names(self) -> list[str]:
        """Returns every name in the family, sorted."""
        return sorted(self._modules)

    def check(self, name: str) -> str:
        """Returns `name`. Raises UsageError with the nearest known name if it is unknown."""
        if (fix := synonyms.DROPPED_NAMES.get(self.noun, {}).get(name)) is not None:
            raise UnknownNameError(f"{self.noun} '{name}' was removed", fix=fix)
        if name not in self._modules:
            fix = synonyms.NAMES.get(self.noun, {}).get(name) or did_you_mean(name, self.names())
            raise UnknownNameError(f"unknown {self.noun} '{name}'", fix=fix)
        return name

    def file(self, name: str) -> Path:
        """Returns the file of `name`. It imports the packages, not the file. Raises UsageError for an unknown name."""
        spec = importlib.util.find_spec(self._modules[self.check(name)])
        assert spec is not None and spec.origin is not None  # it was found by its file
        return Path(spec.origin)

    def load(self, name: str) -> Any:
        """Import the file of `name` and return the class that `ENTRY` or `FILE.py:NAME` names."""
        if self.base and is_in_file(name):
            wanted = getattr(importlib.import_module(f"{self.package}.base"), self.base)
            try:
                found = load_from_file(self.noun, name)
            except UserCodeError as error:
                raise UsageError(f"{self.noun} {name}: {line_of(error)}: {error}") from error.original
            if not (isinstance(found, type) and issubclass(found, wanted)):
                fix = f"write a class that extends {wanted.__name__} of {self.package}.base, and name that"
                raise UsageError(f"{self.noun} {name} is no {self.noun}", fix=fix)
            if missing := sorted(getattr(found, "__abstractmethods__", ())):
                raise UsageError(f"{self.noun} {name} lacks {', '.join(missing)}", fix=f"see {self.package}.base")
            return found
        return importlib.import_module(self._modules[self.check(name)]).ENTRY


_NO_MODES = frozenset({"averaging", "base", "rules", "shared", "single"})
MODES = Family("paramserver.ps.policies", "mode", _NO_MODES, "Policy", ("paramserver.ps.policies.averaging",))
AGGREGATIONS = Family("paramserver.ps.tensors.aggregation", "aggregation", frozenset({"base", "direction"}))
CODECS = Family("paramserver.common.codecs", "codec", frozenset({"base", "shared"}))
TASKS = Family("paramserver.worker.tasks", "task", frozenset({"base", "images"}), "", ("paramserver.drills.tasks",))
BACKENDS = Family("paramserver.launch.backends", "backend", frozenset({"base"}))
TRACKERS = Family("paramserver.ps.observe.trackers", "tracker", frozenset({"base"}))

MODE_ALIASES = {"ssgd": "sync", "bsp": "sync", "asgd": "async", "asp": "async", "averaging": "localsgd"}


def canonical_mode(name: str) -> str:
    """Returns the mode's own name for a name or an alias, or `FILE.py:NAME` with the absolute path.

    Raises UsageError with the nearest name if the mode is unknown.
    """
    if is_in_file(name):
        path, attribute = split_name(MODES.noun, name)
        MODES.load(name)
        return f"{path}:{attribute}"
    return MODES.check(MODE_ALIASES.get(name.strip().lower(), name.strip().lower()))


def mode_anywhere(mode: str) -> str:
    """Returns a mode's name without the folder of its file, as in `my_mode.py:Mine`."""
    return PurePath(mode).name


def mode_label(mode: str) -> str:
    """Returns a mode's short name, for file names: for `FILE.py:NAME` it is NAME."""
    return mode.rpartition(":")[2]
