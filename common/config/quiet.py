"""Ends a program without a traceback when Ctrl-C comes while it loads. Programs import it first."""

import atexit
import contextlib
import gc
import io
import os
import signal
import sys

from ..errors import EXIT_INTERRUPTED

# Another process that imports a program keeps its own Ctrl-C. `python -m` sets argv[0] to `-m` while it searches.
IS_PROGRAM = os.path.basename(sys.argv[0]).startswith(("-m", "ps-"))
if IS_PROGRAM and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))


def end() -> None:
    """The program has loaded everything, and reports Ctrl-C itself from now on."""
    if IS_PROGRAM and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _State:
    is_over = False


def over(code: int) -> None:
    """The exit code is decided: from now on a signal ends the process with it at once.

    Files that a user's task left open are flushed here, because the interpreter does not close all of them.
    """
    _State.is_over = True
    objects = gc.get_objects()
    kinds = {kind for kind in {type(found) for found in objects} if issubclass(kind, io.IOBase)}
    for found in objects:
        if type(found) in kinds:
            with contextlib.suppress(Exception):
                found.flush()
    if not gc.isenabled():  # nothing ran, as in --help: the imports are no garbage
        gc.freeze()
    for number in (signal.SIGINT, signal.SIGTERM):
        # The handler holds what it uses, because modules are gone when the interpreter ends.
        signal.signal(number, lambda *_, end=os._exit: end(code))


@atexit.register  # early, so it comes late
def _nearly_over() -> None:
    """Ignore signals: the interpreter removes Python's handlers before it ends, and the default ones would kill it."""
    if _State.is_over:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
