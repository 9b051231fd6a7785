"""Settings and fixtures of all tests.

Options: `--transport` for faults and campaigns; `--one-of-each` and `--sample-seed` for a sample of the slow tests.
"""

import asyncio
import inspect
import os
import signal

import pytest
import torch
from hypothesis import settings

from paramserver.tests.cluster import cluster, shared_cluster
from paramserver.tests.forks import forks, run
from paramserver.tests.late import LATE_S, signal_late
from paramserver.tests.sample import SEPARATORS, commit, draw

__all__ = ["cluster", "forks", "run", "shared_cluster"]

# gRPC's fork handlers sometimes abort a process that is forked.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Tensors of tests are small. Several threads wait for each other, ten times as long when the cores are busy.
torch.set_num_threads(1)
# A Python process that imports readline sets it for those that it starts, such as the workers of pytest-xdist.
os.environ.pop("COLUMNS", None)
# A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if LATE_S:
    signal_late()
# The time of an example depends on the machine. CI draws the same examples every time, `make campaigns` new ones.
settings.register_profile("fresh", derandomize=False, deadline=None)
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable" if os.environ.get("CI") else "fresh")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--transport", choices=("direct", "grpc"), default="direct", help="of the workers of tests/faults")
    parser.addoption(
        "--one-of-each", choices=tuple(SEPARATORS), help="run one case of each test, one test of each file"
    )
    parser.addoption("--sample-seed", help="seed of --one-of-each (default: the hash of the commit)")


def pytest_configure(config: pytest.Config) -> None:
    """Before xdist copies the options to its workers."""
    if config.option.one_of_each and not config.option.sample_seed:
        config.option.sample_seed = commit()


def pytest_sessionstart(session: pytest.Session) -> None:
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.option.one_of_each and terminal is not None:
        terminal.write_line(f"repeat this sample with --sample-seed {session.config.option.sample_seed}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """After the selection by marks."""
    if config.option.one_of_each:
        chosen = draw((item.nodeid for item in items), config.option.one_of_each, config.option.sample_seed)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]
