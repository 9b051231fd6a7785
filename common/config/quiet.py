"""Imported first by the programs: Ctrl-C while they load ends them as it does later, without a traceback."""

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
