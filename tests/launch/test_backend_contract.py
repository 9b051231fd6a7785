"""What every launch backend promises (launch/backends/base.py), with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from paramserver.common.registry import BACKENDS
from paramserver.launch.backends.base import Backend, Site
from paramserver.launch.plan.hosts import Child, ProcessSpec
from paramserver.launch.supervise.restarts import CANNOT_START
from paramserver.launch.view import parse_event

PROGRAMS = Path(__file__).parent / "programs"
W0, W1 = Child("worker", 0), Child("worker", 1)
DEADLINE_S = 120.0
SITES: dict[str, Site] = {}  # of the test that runs

# A cluster of three nodes of Ray takes longest to start.
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name == "ray" else name for name in BACKENDS.names()]
pytestmark = pytest.mark.parametrize("name", NAMES)


class Reports:
    """What a backend reported, and a way to wait for some of it."""

    def __init__(self) -> None:
        self.lines: list[tuple[Child, str]] = []
        self.codes: dict[Child, int] = {}
        self.lives: list[tuple[int, list[str]]] = []  # of processes that have been started again: code, lines
        self.at_end: Callable[[], object] = lambda: None
        self._news = asyncio.Event()

    def on_line(self, child: Child, line: str) -> None:
        assert child not in self.codes, "a line after the end"
        self.lines.append((child, line))
        self._news.set()

    def on_exit(self, child: Child, code: int) -> None:
        assert child not in self.codes, "a second end"
        self.codes[child] = code
        self.at_end()
        self._news.set()

    def starts_again(self, child: Child) -> None:
        """The process is about to be started again: what it has reported is of an earlier life."""
        self.lives.append((self.codes.pop(child), [line for _, line in self.lines]))
        self.lines.clear()

    async def wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    def pid(self, event_name: str) -> int:
        """The `pid` field of the event with this name."""
        events = [parse_event(line) for _, line in self.lines]
        return next(int(event.fields["pid"]) for event in events if event and event.name == event_name)

    def has(self, word: str) -> bool:
        return any(word in line for _, line in self.lines)


def python(child: Child, *argv: str, **env: str) -> ProcessSpec:
    return ProcessSpec(child, (sys.executable, *argv), env)


def worker(child: Child, todo: str) -> ProcessSpec:
    argv = (str(PROGRAMS / "fake_worker.py"), "--rank", str(child.rank), "--server", "none")
    return python(child, *argv, FAKE_WORKER=todo)


@pytest.fixture(autouse=True)
def site(name: str, request: pytest.FixtureRequest) -> Site:
    """Where the backend of this name may start things."""
    here: Site = request.getfixturevalue(f"{name}_site")
    SITES[name] = here
    return here


def use(name: str, story: Callable[[Backend, Reports], object]) -> Reports:
    """Play a story against a backend inside a loop of its own."""

    async def play() -> Reports:
        reports = Reports()
        backend = BACKENDS.load(name)(reports.on_line, reports.on_exit, SITES[name])
        try:
            await backend.prepare([python(W0), python(W1)])
            await story(backend, reports)  # type: ignore[misc]
        finally:
            await backend.close()
        return reports

    return asyncio.run(play())


def ended(name: str, *specs: ProcessSpec) -> Reports:
    """Start these, and wait for the end of each."""

    async def story(backend: Backend, reports: Reports) -> None:
        for spec in specs:
            backend.start(spec)
        await reports.wait(lambda: len(reports.codes) == len(specs))

    return use(name, story)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_every_line_comes_before_the_end(name: str) -> None:
    prints = python(W0, "-c", "for i in range(20000): print('line', i)\nprint('no end', end='')")
    reports = ended(name, prints, python(W1, "-c", "import sys; sys.exit(12)"))
    assert [line for _, line in reports.lines] == [*(f"line {i}" for i in range(20000)), "no end"]
    assert reports.codes == {W0: 0, W1: 12}


def test_results_of_any_length_arrive_whole_before_the_end(name: str) -> None:
    write = "import os; f = open(int(os.environ['PS_RESULTS_DESCRIPTOR']), 'wb'); f.write(bytes(range(256)) * 20000)"
    spec = ProcessSpec(W0, (sys.executable, "-c", f"print('before'); {write}; print('after')"), {}, reports=True)
    at_end = {}

    async def story(backend: Backend, reports: Reports) -> None:
        backend.start(spec)
        backend.start(python(W1, "-c", "import os; assert 'PS_RESULTS_DESCRIPTOR' not in os.environ"))
        await reports.wait(lambda: len(reports.codes) == 2)
        at_end.update(backend.results)

    reports = use(name, story)
    assert reports.codes == {W0: 0, W1: 0}
    assert at_end == {W0: bytes(range(256)) * 20000, W1: b""}
    assert [line for child, line in reports.lines if child == W0] == ["before", "after"]


def test_both_outputs_come_in_the_order_they_were_written(name: str) -> None:
    code = "import sys\nfor i in range(50): print(i, file=(sys.stdout, sys.stderr)[i % 2], flush=True)"
    reports = ended(name, python(W0, "-c", code))
    assert [line for _, line in reports.lines] == [str(i) for i in range(50)]


def test_a_program_that_does_not_exist_ends_at_once(name: str) -> None:
    reports = ended(name, ProcessSpec(W0, ("/no/such/program",), {}))
    assert reports.codes == {W0: CANNOT_START}
    assert reports.has("/no/such/program")


def test_the_launchers_own_place_is_not_the_childs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE", "PS_SERVER", "SLURM_PROCID"):
        monkeypatch.setenv(variable, "7")
    monkeypatch.setenv("PS_RUN__SEED", "5")
    monkeypatch.setenv("PS_TOKEN", "secret")  # which reaches children in no other way
    names = ["RANK", "WORLD_SIZE", "PS_SERVER", "SLURM_PROCID", "PS_RUN__SEED", "PS_TOKEN"]
    code = f"import os, sys; print(*[os.environ.get(n) for n in {names}], sys.stdin.read())"
    assert ended(name, python(W0, "-c", code, RANK="1")).lines == [(W0, "1 None None None 5 secret ")]


def test_a_child_is_started_again_after_its_end(name: str, wait_until) -> None:
    """From within the report of its end, or later; each life has its own lines, its own end and its own family."""
    lives = [python(W0, "-c", "print('second life', end='')"), worker(W0, "family")]
    families = []

    async def story(backend: Backend, reports: Reports) -> None:
        def start_again() -> None:
            reports.at_end = lambda: None
            families.append(reports.pid("has_child"))
            reports.starts_again(W0)
            backend.start(lives[0])

        reports.at_end = start_again
        backend.start(worker(W0, "orphan 3"))
        await reports.wait(lambda: bool(reports.lives) and W0 in reports.codes)
        backend.terminate(W0)  # between two lives there is nothing to end
        backend.kill(W0)
        reports.starts_again(W0)
        backend.start(lives[1])
        await reports.wait(lambda: reports.has("hanging"))
        families.append(reports.pid("has_child"))
        backend.kill(W0)
        await reports.wait(lambda: W0 in reports.codes)

    reports = use(name, story)
    (first, _), second = reports.lives
    assert (first, second, reports.codes) == (3, (0, ["second life"]), {W0: -signal.SIGKILL})
    wait_until(lambda: all(map(is_gone, families)))


def test_terminate_lets_a_process_end_in_good_order(name: str) -> None:
    async def story(backend: Backend, reports: Reports) -> None:
        backend.start(worker(W0, "hang"))
        await reports.wait(lambda: reports.has("hanging"))
        backend.terminate(W0)
        await reports.wait(lambda: W0 in reports.codes)
        backend.terminate(W0)
        backend.kill(W0)

    assert use(name, story).codes == {W0: 143}


def test_close_leaves_nothing_behind(name: str, wait_until) -> None:
    async def story(backend: Backend, reports: Reports) -> None:
        backend.start(worker(W0, "family"))
        await reports.wait(lambda: reports.has("hanging"))

    reports = use(name, story)
    assert reports.codes == {}
    assert is_gone(reports.pid("joined"))
    wait_until(lambda: is_gone(reports.pid("has_child")))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_launcher(name: str, number: int, marked, wait_until, read_until) -> None:
    settings = {name: value for name, value in os.environ.items() if name.startswith("PS_LAUNCH__")}
    owner = marked.start(str(PROGRAMS / "start_and_wait.py"), name, **settings)
    read_until(owner.stdout, "hanging")
    assert len(marked.left()) >= 3  # the owner, the worker and the worker's child
    os.kill(owner.pid, number)
    owner.communicate(timeout=DEADLINE_S)
    wait_until(lambda: marked.left() == [], 5.0)
