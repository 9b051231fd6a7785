"""Ends a program without a traceback when Ctrl-C comes while it loads. Programs import it first."""

import atexit
import contextlib
import gc
import io
import os
import signal
import sys

from ..errors import EXIT_INTERRUPTED

# Another process that imports a program keeps its own Ctrl-C. `python -m` sets argv[0] to `-m` while it searches,
# and then to the file.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
IS_PROGRAM = os.path.basename(sys.argv[0]).startswith(("-m", "ps-")) or (
    os.path.basename(sys.argv[0]) == "__main__.py" and os.path.abspath(sys.argv[0]).startswith(_PACKAGE)
)
if IS_PROGRAM and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))


# A program whose output is closed (`>&-`) writes to nothing; the next file that it opens must not become its output.
for _number, _name in enumerate(("stdin", "stdout", "stderr") if IS_PROGRAM else ()):
    try:
        os.fstat(_number)
    except OSError:
        _null = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
        os.set_inheritable(_null, True)
        setattr(sys, _name, open(_null, "r" if _number == 0 else "w", closefd=False))  # noqa: SIM115

for _stream in (sys.stdout, sys.stderr) if IS_PROGRAM else ():  # a locale without a character prints its escape
    if isinstance(_stream, io.TextIOWrapper):
        _stream.reconfigure(errors="backslashreplace")


def end() -> None:
    """Restore Python's Ctrl-C, because the program is loaded and reports Ctrl-C itself."""
    if IS_PROGRAM and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _State:
    is_over = False


def over(code: int) -> None:
    """Make any further signal end the process at once with the exit code `code`.

    This also flushes files that a user's task left open, because the interpreter does not close all of them.
    """
    _State.is_over = True
    objects = gc.get_objects()
    kinds = {kind for kind in {type(found) for found in objects} if issubclass(kind, io.IOBase)}
    for found in objects:
        if type(found) in kinds:
            with contextlib.suppress(Exception):
                found.flush()
    if not gc.isenabled():  # no command ran, as in --help: the last collection need not visit the imported modules
        gc.freeze()
    for number in (signal.SIGINT, signal.SIGTERM):
        # The handler keeps a reference to `os._exit`, because modules are cleared when the interpreter ends.
        signal.signal(number, lambda *_, end=os._exit: end(code))


@atexit.register  # registered early, so it runs late
def _nearly_over() -> None:
    """Ignore signals: the interpreter removes Python's handlers before it ends, and a default handler would kill it."""
    if _State.is_over:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
