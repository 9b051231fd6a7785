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
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

from . import dropped, synonyms
from .errors import UnknownNameError, UsageError, did_you_mean
from .user_code import UserCodeError, is_in_file, line_of, load_from_file, split_name


class Family:
    """The implementations found in one package, e.g. `Family("paramserver.ps.policies", "mode")`.

    Files whose name is in `support` have shared code, not an implementation. `base` names a class of the package's
    `base.py`: a user's class that extends it is an implementation too, named `FILE.py:NAME`. `others` are further
    packages with implementations. `dropped`: names of earlier versions, each with its fix.
    """

    def __init__(
        self,
        package: str,
        noun: str,
        support: frozenset[str] = frozenset(),
        base: str = "",
        *others: str,
        dropped: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.package = package
        self.noun = noun
        self.packages = (package, *others)
        self._support = support
        self._base = base
        self._dropped = dropped

    @cached_property
    def _modules(self) -> dict[str, str]:
        found = {}
        for package in self.packages:
            spec = importlib.util.find_spec(package)
            if spec is None or spec.submodule_search_locations is None:
                raise ModuleNotFoundError(f"no package {package}")
            stems = (info.name for info in pkgutil.iter_modules(spec.submodule_search_locations))
            found.update({stem.rstrip("_"): f"{package}.{stem}" for stem in stems if stem not in self._support})
        return found

    def names(self) -> list[str]:
        """Returns every name in the family, sorted."""
        return sorted(self._modules)

    def check(self, name: str) -> str:
        """Returns `name`. Raises UsageError with the nearest known name if it is unknown."""
        if name in self._dropped:
            raise UnknownNameError(f"{self.noun} '{name}' was removed", fix=self._dropped[name])
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
        if self._base and is_in_file(name):
            return self._load_users(name)
        return importlib.import_module(self._modules[self.check(name)]).ENTRY

    def _load_users(self, name: str) -> Any:
        """Returns the class in a user's file. Raises UsageError, also if the file itself raises an exception."""
        wanted = getattr(importlib.import_module(f"{self.package}.base"), self._base)
        try:
            found = load_from_file(self.noun, name)
        except UserCodeError as error:
            raise UsageError(f"{self.noun} {name}: {line_of(error)}: {error}") from error.original
        if not (isinstance(found, type) and issubclass(found, wanted)):
            raise UsageError(
                f"{self.noun} {name} is no {self.noun}",
                fix=f"write a class that extends {wanted.__name__} of {self.package}.base, and name that",
            )
        missing = sorted(getattr(found, "__abstractmethods__", ()))
        if missing:
            raise UsageError(f"{self.noun} {name} lacks {', '.join(missing)}", fix=f"see {self.package}.base")
        return found


_NO_MODES = frozenset({"averaging", "base", "rules", "shared", "single"})
MODES = Family("paramserver.ps.policies", "mode", _NO_MODES, "Policy", "paramserver.ps.policies.averaging")
AGGREGATIONS = Family("paramserver.ps.tensors.aggregation", "aggregation", frozenset({"base", "direction", "order"}))
CODECS = Family("paramserver.common.codecs", "codec", frozenset({"base", "shared"}), dropped=dropped.CODECS)
TASKS = Family("paramserver.worker.tasks", "task", frozenset({"base", "images"}), "", "paramserver.drills.tasks")
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


def _modes_that(can: Callable[[Any], bool]) -> str:
    return ", ".join(name for name in MODES.names() if can(MODES.load(name)))


def check_mode(mode: str, config: Any) -> None:
    """Refuse settings of the sections `policy` and `store` that workers of this mode cannot follow.

    The server and the launcher call it with the whole configuration. Raises UsageError.
    """
    policy, store = config.policy, config.store
    options = policy.options(mode)
    check_fragments(mode, options, policy.delayed_update)
    if policy.delayed_update:
        _check_delayed_update(mode, options)
    check_contributions(mode, policy.aggregation, store.max_norm, store.clip_norm)


def check_contributions(mode: str, aggregation: str, max_norm: float | None, clip_norm: float | None = None) -> None:
    """Refuse an aggregation or a norm limit that does not fit the contributions of this mode. Raises UsageError."""
    AGGREGATIONS.check(aggregation)
    policy = MODES.load(mode)
    if not policy.may_aggregate and (aggregation != "mean" or clip_norm is not None):
        fix = f"take a mode that does: {_modes_that(lambda policy: policy.may_aggregate)}"
        setting = f"policy.aggregation is {aggregation}"
        if clip_norm is not None:
            setting, fix = f"store.clip_norm is {clip_norm:g}", f"{fix}; or clip in the worker's own loop"
        raise UsageError(f"{setting}, and mode {mode} does not take one step along the mean of all", fix=fix)
    if max_norm is not None and not policy.kind.server_steps:
        able = _modes_that(lambda policy: policy.kind.server_steps)
        message = f"store.max_norm is {max_norm:g}, but workers of mode {mode} send weights: the limit is for gradients"
        raise UsageError(message, fix=f"clip gradients in the worker's own loop, or use a mode that sends them: {able}")


WITHIN_WORKER = 3  # the stage of worker.zero that divides the model among the processes of a worker


def check_zero(zero: int, mode: str, has_peers: bool, outstanding: int) -> None:
    """Refuse a stage of `worker.zero` that workers of this mode do not support.

    Workers divide optimizer state where they average among themselves (`has_peers`) and wait for each mean
    (`outstanding` is 0). The server, the launcher and the worker call it. Raises UsageError.
    """
    if not zero or (zero == WITHIN_WORKER and not has_peers):
        return
    setting = f"worker.zero is {zero}"
    if zero == WITHIN_WORKER:
        message = f"{setting} in mode {mode}: fully_shard's collectives are of processes that stay the same"
        fix = "--set worker.zero=1 divides optimizer state; in --mode sync the processes of a worker"
        raise UsageError(f"{message}, and workers come and go", fix=f"{fix} (--group) divide the model")
    if not has_peers:
        message = f"{setting}, and workers of mode {mode} do not average among themselves"
        raise UsageError(message, fix="leave it out, or --mode allreduce; --shards S --colocate divides the server's")
    if outstanding:
        message = f"{setting}, and policy.staleness {outstanding}: each worker steps by itself along outstanding means"
        raise UsageError(message, fix="leave one of them out")


def check_fragments(mode: str, options: Any, delayed_update: bool) -> None:
    """Refuse fragments that do not divide the mode's local steps, and impossible overlaps. Raises UsageError."""
    num = getattr(options, "fragments", 1)
    if num > 1 and options.local_steps % num:
        message = f"policy.fragments is {num}, and policy.local_steps is {options.local_steps}, no multiple of it"
        raise UsageError(message, fix=f"--local-steps {-(-options.local_steps // num) * num}, or other --fragments")
    if not hasattr(options, "overlap_steps"):
        return
    chosen = sorted({"overlap_steps", "merge", "merge_alpha"} & options.model_fields_set)
    if chosen and not delayed_update:
        setting = f"policy.{chosen[0]} is {getattr(options, chosen[0])}"
        raise UsageError(
            f"{setting}, and workers of mode {mode} wait for every exchange", fix="--delayed-update, or leave it out"
        )
    if "merge_alpha" in chosen and options.merge != "blend":
        message = f"policy.merge_alpha is {options.merge_alpha:g}, but policy.merge {options.merge} does not use it"
        raise UsageError(message, fix="use --merge blend, or leave policy.merge_alpha out")
    most = options.local_steps // num
    if (options.overlap_steps or 0) > most:
        message = (
            f"policy.overlap_steps is {options.overlap_steps}, and the next exchange begins {most} local steps later"
        )
        settings = f"policy.local_steps is {options.local_steps}, policy.fragments {num}"
        raise UsageError(f"{message} ({settings})", fix=f"--overlap-steps {most} or fewer, or more --local-steps")


def _check_delayed_update(mode: str, options: Any) -> None:
    """Refuse delayed updates in a mode without them, or with too small a staleness. Raises UsageError."""
    policy, setting = MODES.load(mode), f"--delayed-update (policy.delayed_update) with mode {mode}"
    if not policy.may_delay_update:
        able = _modes_that(lambda policy: policy.may_delay_update)
        message = f"{setting}: its workers compute on nothing but the newest weights"
        raise UsageError(message, fix=f"leave it out, or take a mode that can: {able}")
    if getattr(options, "late_cut", None) == 1:
        message = f"{setting} and late_cut 1: every contribution is one version late, and would be dropped"
        raise UsageError(message, fix="--set policy.late_cut=2 or more")
    least = policy.least_delayed_staleness
    staleness = getattr(options, "staleness", least)
    if staleness < least:
        message = f"{setting} and staleness {staleness}: the step computed during an exchange is one ahead"
        raise UsageError(message, fix=f"--staleness {least} or more")


def check_codec_of_peers(codec: str, zero: int, outstanding: int) -> None:
    """Refuse a codec (not raw) that workers cannot use to average among themselves. Raises UsageError."""
    name, value = ("worker.zero", zero) if zero else ("policy.staleness", outstanding)
    if value:
        message = f"worker.codec is {codec} and {name} is {value}: peers encode whole gradients, one step after another"
        raise UsageError(message, fix=f"leave one of them out: --set {name}=0, or --set worker.codec=raw")
