"""For all tests: nothing is forked into gRPC's own fork handlers, which abort the new process now and then. And the
transport that faults and campaigns go over (`--transport grpc`), and how much of the longest is run
(`--one-of-each`)."""

import os
import signal
import zlib

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
    parser.addoption("--transport", choices=("direct", "grpc"), default="direct", help="of the workers of tests/faults")
    parser.addoption("--one-of-each", choices=("test", "file"), help="run one case of each test, one test of each file")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Always the same one, and not the first: so all modes and transports have some. Behind the selection by marks."""
    separator = {"test": "[", "file": "::"}.get(config.getoption("one_of_each"))
    if separator is None:
        return
    first: dict[str, pytest.Item] = {}
    for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
        first.setdefault(item.nodeid.partition(separator)[0], item)
    chosen = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]
