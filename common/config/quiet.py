"""Imported first by the programs: Ctrl-C while they load ends them as it does later, without a traceback."""

import atexit
import contextlib
import gc
import io
import os
import signal
import sys

from ..errors import EXIT_INTERRUPTED

# Not in whoever else imports a program: its Ctrl-C is its own. `-m` is what `python -m` says while it looks.
IS_PROGRAM = os.path.basename(sys.argv[0]).startswith(("-m", "ps-"))
if IS_PROGRAM and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))


def end() -> None:
    """All is loaded that a program needs to say what became of it."""
    if IS_PROGRAM and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _State:
    is_over = False


def over(code: int) -> None:
    """What became of the program is decided: a signal ends it with that at once, whatever it still puts away. Files
    that a user's task has left open are written now: the end of the interpreter does not come to all of them."""
    _State.is_over = True
    objects = gc.get_objects()
    kinds = {kind for kind in {type(found) for found in objects} if issubclass(kind, io.IOBase)}  # few beside objects
    for found in objects:
        if type(found) in kinds:
            with contextlib.suppress(Exception):
                found.flush()
    if not gc.isenabled():  # nothing ran, as in --help: nobody looks for garbage in what was imported for it
        gc.freeze()
    for number in (signal.SIGINT, signal.SIGTERM):
        # What the handler uses it holds: modules are gone when the interpreter ends.
        signal.signal(number, lambda *_, end=os._exit: end(code))


@atexit.register  # early, so it comes late
def _nearly_over() -> None:
    """The interpreter puts Python's handlers away before it ends, and what stood there before them would kill it."""
    if _State.is_over:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
