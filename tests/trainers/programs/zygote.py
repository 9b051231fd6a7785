"""Imports a program once and forks it for every line of its input: trainers take longer to import than to train.

A line is {"log": FILE, "environ": {...}, "argv": [...]}; the reply is the process' id, and FILE.code its exit code.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def run(main: Callable[[], object], log: str, environ: dict[str, str], argv: list[str]) -> None:
    """In the child."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(environ)
    sys.argv = [sys.argv[1], *argv]
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    import atexit

    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def loop() -> None:
    main = importlib.import_module(sys.argv[1]).main
    for name in ("torch._dynamo", "paramserver.ps.server", "paramserver.worker.api"):  # what comes late otherwise
        importlib.import_module(name)
    logs: dict[int, str] = {}
    print("ready", flush=True)
    while True:
        if select.select([sys.stdin], [], [], 0.02)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            told = json.loads(line)
            if not (pid := os.fork()):
                run(main, **told)
            logs[pid] = told["log"]
            print(pid, flush=True)
        while logs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            code = Path(f"{logs.pop(pid)}.code")
            code.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(status)))
            code.with_suffix(".new").rename(code)


loop()
