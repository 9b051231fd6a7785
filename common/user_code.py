"""Loads tasks and modes from a user's own file, `FILE.py:NAME`.

A mistake in the name is a UsageError. An exception of the user's code becomes a UserCodeError. Its
traceback begins in the user's file and leaves out the frames of this program above it.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

from .errors import ParamServerError, UsageError, did_you_mean


class UserCodeError(Exception):
    """An exception of the user's code. `original` is that exception; `format_user_traceback` shows where it arose."""

    def __init__(self, original: Exception) -> None:
        super().__init__(f"{type(original).__name__}: {original}")
        self.original = original


@contextmanager
def user_code() -> Iterator[None]:
    """Wraps a call of the user's code: its exceptions become UserCodeError, except errors raised on purpose.

    KeyboardInterrupt, SystemExit, ParamServerError and UserCodeError pass through.
    """
    try:
        yield
    except (ParamServerError, UserCodeError):
        raise
    except Exception as error:
        raise UserCodeError(error) from error


def format_user_traceback(error: UserCodeError | Exception) -> str:
    """Returns the traceback as Python prints it, from the first frame of the user's code."""
    original = error.original if isinstance(error, UserCodeError) else error
    # Without a frame of the user: e.g. torch's collate function, given what the user's data set returned.
    for is_wanted in (_is_users, lambda module: not _is_machinery(module)):
        trace = original.__traceback__
        while trace is not None and not is_wanted(trace.tb_frame.f_globals.get("__name__", "")):
            trace = trace.tb_next
        if trace is not None:
            return "".join(traceback.format_exception(type(original), original, trace))
    # E.g. a syntax error: Python could not run a line of the file.
    return "".join(traceback.format_exception_only(original))


def _is_users(module: str) -> bool:
    """Returns whether a frame of `module` is user code; the file of a built-in task counts as user code."""
    return not _is_machinery(module) and module.partition(".")[0] != "torch"


def _is_machinery(module: str) -> bool:
    """Decides by module name, not by path: a user's file may be inside a checkout of this project."""
    if module.startswith(("paramserver.worker.tasks.", "paramserver.drills.tasks.")):
        return False
    return module.partition(".")[0] in {"paramserver", "importlib"}


def is_in_file(name: str) -> bool:
    """Returns whether a name is `FILE.py:NAME`, not a built-in name."""
    return ".py:" in name


def line_of(error: UserCodeError) -> str:
    """Returns `FILE.py:7`: where in the user's code an exception arose."""
    original = error.original
    if isinstance(original, SyntaxError):
        return f"{original.filename}:{original.lineno}"
    lines = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(original.__traceback__)
        if _is_users(frame.f_globals.get("__name__", ""))
    ]
    return lines[-1] if lines else "?"


def split_name(label: str, name: str) -> tuple[Path, str]:
    """Returns the absolute path of the file, and the attribute that it should define.

    Raises UsageError about a `label`, such as "mode", if there is no such file.
    """
    file, _, attribute = name.strip().rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        fix = "the path is relative to the working directory; the form is FILE.py:NAME"
        raise UsageError(f"{label} {name}: no file {path}", fix=fix)
    return path, attribute


def load_from_file(label: str, name: str) -> Any:
    """Returns the object that `FILE.py:NAME` names; `label` is its kind. Runs the file once per process.

    Raises UsageError and UserCodeError.
    """
    path, attribute = split_name(label, name)
    folder = str(path.parent)
    if folder not in sys.path:  # as `python FILE.py` does, so that the file can import its neighbours
        sys.path.insert(0, folder)
    module_name = _module_name(path)
    if (module := sys.modules.get(module_name)) is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None  # the name ends in .py
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # before the file runs: dataclasses and pickle look their module up
        try:
            with user_code():
                spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    if attribute not in vars(module):
        defined = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        fix = did_you_mean(attribute, defined) if defined else "it defines no class: write one"
        raise UsageError(f"{path} defines no {attribute!r}", fix=fix)
    return getattr(module, attribute)


def _module_name(path: Path) -> str:
    """The file's stem where `import STEM` means this very file, otherwise a unique name.

    The stem lets a DataLoader worker started by spawn, which gets our sys.path but not our
    modules, unpickle objects of the file. A file called e.g. random.py must not take the place
    of the real one.
    """
    stem = path.stem
    if (loaded := sys.modules.get(stem)) is not None:
        origin = getattr(loaded, "__file__", None)
    else:
        spec = importlib.util.find_spec(stem) if stem.isidentifier() else None
        origin = spec.origin if spec else None
    is_this = origin is not None and Path(origin).resolve() == path
    return stem if is_this else f"{stem}_{crc32(str(path).encode()):08x}"
