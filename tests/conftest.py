"""For all tests: nothing is forked into gRPC's own fork handlers, which abort the new process now and then. And the
lane that faults and campaigns go over (`--lane grpc`)."""

import os
import signal

import pytest
from hypothesis import settings

from paramserver.tests.late import LATE_S, signal_late

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if LATE_S:
    signal_late()
# How long an example takes is the machine's matter: two cores are shared by several tests.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", choices=("direct", "grpc"), default="direct", help="of the workers of tests/faults")
