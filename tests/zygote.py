"""Imports what programs need once, and forks itself for every line of its input: importing takes longer than training.

A line is {"log": FILE, "errors": FILE, "environ": {...}, "folder": DIR, "argv": ["-m", MODULE, ...] or [SCRIPT, ...]},
where `log` and `errors` are the files of the two outputs. The reply is the id of the process; LOG.code will be its exit
code. argv of this program: modules to import besides.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import runpy
import select
import signal
import sys
import threading
from pathlib import Path
from types import TracebackType

from paramserver.common.config.sources import load_config
from paramserver.common.registry import MODES

# Some of them are imported late otherwise, by every process.
MODULES = (
    "torch._dynamo", "sklearn.datasets", "structlog.stdlib", "encodings.idna", "grpc._channel", "paramserver.ps.main",
    "paramserver.ps.server", "paramserver.worker.main", "paramserver.worker.api", "paramserver.worker.trainer",
    "paramserver.worker.replica_group.strategy", "torch.distributed.checkpoint.state_dict", "typer._click.decorators",
    "paramserver.common.codecs.raw",
)  # fmt: skip
_PR_SET_PDEATHSIG = 1


def execute(argv: list[str]) -> None:
    """As `python ARGV` does."""
    if argv[0] != "-m":
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).parent)
        runpy.run_path(argv[0], run_name="__main__")
        return
    spec = importlib.util.find_spec(argv[1])
    assert spec is not None
    is_package = spec.submodule_search_locations is not None
    sys.argv, sys.path[0] = [spec.origin or argv[1], *argv[2:]], os.getcwd()
    importlib.import_module(f"{argv[1]}.main" if is_package else argv[1]).main()


def own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's first frame on."""
    while trace is not None and ("runpy" in trace.tb_frame.f_code.co_filename or trace.tb_frame.f_globals is globals()):
        trace = trace.tb_next
    return trace


def run(log: str, errors: str, environ: dict[str, str], folder: str, argv: list[str]) -> None:
    """In the child."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(environ)
    for number, path in ((1, log), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()  # one that hangs says where
    interrupted = False
    try:
        execute(argv)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code == 1 and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__  # as Python does
        sys.excepthook(type(error), error, own_frames(error.__traceback__))
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def loop() -> None:
    for name in (*MODULES, *sys.argv[1:]):
        importlib.import_module(name)
    for mode in MODES.names():
        MODES.load(mode)
    load_config(None, {}, [], {})  # the classes of the configuration are built when they are first used
    gc.collect()
    gc.freeze()  # a collection in a child looks at what the child has made, and copies no page of ours
    logs: dict[int, str] = {}
    print("ready", flush=True)
    while True:
        if select.select([sys.stdin], [], [], 0.02)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            order = json.loads(line)
            if not (pid := os.fork()):
                run(**order)
            logs[pid] = order["log"]
            print(pid, flush=True)
        while logs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            code = Path(f"{logs.pop(pid)}.code")
            code.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(status)))
            code.with_suffix(".new").rename(code)


if __name__ == "__main__":  # and not in what a program spawns
    loop()
