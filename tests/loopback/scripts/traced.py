"""Runs a module and writes which functions of the project are called. argv: OUTPUT MODULE ARGUMENTS...

Each line is a call: nanoseconds (monotonic), the file that calls, the file that is entered, the function. `_take_step`
begins a training step, and `<end>` ends it.
"""

import runpy
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import paramserver

ROOT = f"{Path(paramserver.__file__).parent}/"
PACKAGES = ("worker/", "common/", "ps/")
entries: list[tuple[int, str, str, str]] = []
_files: dict[str, str] = {}


def project_file(path: str) -> str:
    """The path below the project's root, empty for other files and those of no traced package."""
    if path not in _files:
        name = path.removeprefix(ROOT)
        _files[path] = name if path.startswith(ROOT) and name.startswith(PACKAGES) else ""
    return _files[path]


def profile(frame: FrameType, event: str, _: Any) -> None:
    is_step = frame.f_code.co_name == "_take_step"
    file = project_file(frame.f_code.co_filename)
    if not file or not (event == "call" or (event == "return" and is_step)):
        return
    caller = frame.f_back
    while caller is not None and not (name := project_file(caller.f_code.co_filename)):
        caller = caller.f_back
    came_from = name if caller is not None else ""
    entries.append((time.monotonic_ns(), came_from, file, "<end>" if event == "return" else frame.f_code.co_name))


def main() -> None:
    output, module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        runpy.run_module(module, run_name="__main__")
    finally:
        sys.setprofile(None)
        Path(output).write_text("".join(f"{' '.join(map(str, (at, a or '-', b, f)))}\n" for at, a, b, f in entries))


main()
