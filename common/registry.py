"""Finds the implementations of a family by their files: one file, one name.

A mode, a codec, a task or a launch backend is one file in its folder; its name is the
file's stem (a trailing underscore is dropped, so that `async_.py` may be called async).
The file defines one public class named in `ENTRY`. Names can be listed without importing
anything, which is how the launcher refuses an unknown mode without loading torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from functools import cached_property
from typing import Any

from .errors import UsageError, did_you_mean


class Family:
    """The implementations found in one package, e.g. `Family("paramserver.ps.policies", "mode")`.

    Files whose name is in `support` hold shared code, not an implementation.
    """

    def __init__(self, package: str, what: str, support: frozenset[str] = frozenset()) -> None:
        self.package = package
        self.what = what
        self._support = support

    @cached_property
    def _modules(self) -> dict[str, str]:
        spec = importlib.util.find_spec(self.package)
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError(f"no package {self.package}")
        found = (info.name for info in pkgutil.iter_modules(spec.submodule_search_locations))
        return {stem.rstrip("_"): stem for stem in found if stem not in self._support}

    def names(self) -> list[str]:
        """Every name in the family, sorted."""
        return sorted(self._modules)

    def check(self, name: str) -> str:
        """`name` itself, or a UsageError that names the nearest known one."""
        if name not in self._modules:
            raise UsageError(f"unknown {self.what} '{name}'", fix=did_you_mean(name, self.names()))
        return name

    def load(self, name: str) -> Any:
        """Import the file of `name` and return the class its `ENTRY` names."""
        stem = self._modules[self.check(name)]
        module = importlib.import_module(f"{self.package}.{stem}")
        return module.ENTRY


MODES = Family("paramserver.ps.policies", "mode", frozenset({"base", "rounds"}))
CODECS = Family("paramserver.common.codecs", "codec", frozenset({"base"}))
TASKS = Family("paramserver.worker.tasks", "task", frozenset({"base"}))
BACKENDS = Family("paramserver.launch.backends", "backend", frozenset({"base"}))

MODE_ALIASES = {"ssgd": "sync", "bsp": "sync", "asgd": "async", "asp": "async", "averaging": "localsgd"}


def canonical_mode(name: str) -> str:
    """The mode's own name for it or one of its aliases; UsageError with the nearest name otherwise."""
    return MODES.check(MODE_ALIASES.get(name.strip().lower(), name.strip().lower()))
