"""Whose exception ended a process: shown once, and a second time at the same place ends the job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paramserver.launch.plan.process import SERVER, Child
from paramserver.launch.supervise.blame import Blame, Raised
from paramserver.launch.supervise.supervisor import Finish, Restart, Supervisor, Terminate

W0, W1 = Child("worker", 0), Child("worker", 1)
RAISED = Raised("ValueError: bad batch 7", "train.py, line 9")

SCRIPTS = {
    "in a function": ("def f():\n    raise ValueError('bad batch')\nf()\n", "ValueError: bad batch", 2),
    "in a library": ("import json\njson.loads('x')\n", "json.decoder.JSONDecodeError: Expecting value", 2),
    "the last of several": ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    [][1]\n", "IndexError: list", 4),
    "no syntax": ("x = (\n", "SyntaxError: '(' was never closed", 1),
    "several lines": ("raise ValueError('one\\ntwo')\n", "ValueError: one", 1),
}


@pytest.mark.parametrize(("text", "description", "line"), SCRIPTS.values(), ids=SCRIPTS)
def test_what_python_prints_is_read(tmp_path: Path, text: str, description: str, line: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    output = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False).stderr.splitlines()
    blame = Blame()
    blame.started(W0)
    assert [shown for line in output for shown in blame.read(W0, line)] == output
    raised = blame.last[W0]
    assert raised.text.startswith(description)
    assert raised.where == f"{script}, line {line}"


def test_the_same_of_another_process_is_one_line() -> None:
    blame = Blame()
    text = ["Traceback (most recent call last):", '  File "train.py", line 9, in f', "    bad()", RAISED.text]
    assert [blame.read(W0, line) for line in text] == [[], [], [], text]
    assert blame.read(W1, json.dumps("other output")) == ['"other output"']
    again = [*text[:-1], "ValueError: bad batch 8"]
    assert [blame.read(W1, line) for line in again] == [
        [], [], [], ["ValueError: bad batch 8 (train.py, line 9): the same as above"]
    ]  # fmt: skip
    assert blame.read(W0, text[0]) == []
    assert blame.rest(W0) == [text[0]]
    assert blame.rest(W0) == []


def test_an_exception_that_the_process_has_handled_did_not_end_it() -> None:
    blame = Blame()
    for line in ("Traceback (most recent call last):", '  File "train.py", line 9, in f', "    bad()", RAISED.text):
        blame.read(W0, line)
    blame.connected(W0)
    assert W0 not in blame.last
    for line in ("Traceback (most recent call last):", '  File "train.py", line 9, in f', "    bad()", RAISED.text):
        blame.read(W0, line)
    assert blame.last[W0] == RAISED
    assert blame.read(W0, "going on without the cache") == ["going on without the cache"]
    assert W0 not in blame.last


def test_what_ends_a_script_before_it_connects_is_named_whatever_it_prints_at_its_exit() -> None:
    blame = Blame()
    blame.started(W0)
    for line in ("Traceback (most recent call last):", '  File "train.py", line 9, in f', "    bad()", RAISED.text):
        blame.read(W0, line)
    blame.read(W0, "the tracker has written its files")
    assert blame.last[W0] == RAISED


def test_lines_of_exit_handlers_are_not_those_of_a_process_that_went_on() -> None:
    blame = Blame()
    for line in ("Traceback (most recent call last):", '  File "train.py", line 9, in f', "    bad()", RAISED.text):
        blame.read(W0, line)
    blame.uncaught(W0)
    blame.read(W0, "tracker: run finished")
    assert blame.last[W0] == RAISED


def test_a_lost_connection_after_a_long_time_is_another_failure() -> None:
    supervisor = running()
    lost = Raised("ConnectionError: reset by peer", "train.py, line 9")
    for now in (1.0, 70 * 3600.0):
        (restart,) = supervisor.exited(W0, 1, now, lost)
        assert isinstance(restart, Restart) and restart.number == 1
        supervisor.tick(now + 1.0)
    assert {type(decision) for decision in supervisor.exited(W0, 1, 70 * 3600.0 + 2.0, lost)} == {Terminate}


def running(max_restarts: int = 3) -> Supervisor:
    supervisor = Supervisor(num_workers=2, max_restarts=max_restarts)
    supervisor.begin(0.0)
    supervisor.listening(SERVER, 0.0)
    supervisor.may_train(0.0)
    return supervisor


def test_the_same_exception_at_the_same_place_ends_the_job_after_one_restart() -> None:
    supervisor = running()
    (restart,) = supervisor.exited(W0, 1, 1.0, RAISED)
    assert isinstance(restart, Restart)
    assert restart.reason.startswith("worker 0 failed: ValueError: bad batch 7 (train.py, line 9); started again")
    supervisor.tick(2.0)
    decisions = supervisor.exited(W0, 1, 500.0, Raised("ValueError: bad batch 8", RAISED.where))
    assert {type(decision) for decision in decisions} == {Terminate}
    (finish,) = [d for child in (W1, SERVER) for d in supervisor.exited(child, 143, 501.0)]
    assert isinstance(finish, Finish)
    assert finish.exit_code == 1
    assert finish.reason.endswith("bad batch 8 (train.py, line 9); the same had ended it before it was started again")


@pytest.mark.parametrize("other", [Raised("OSError: gone", RAISED.where), Raised(RAISED.text, "train.py, line 10")])
def test_another_exception_or_another_place_is_another_failure(other: Raised) -> None:
    supervisor = running()
    supervisor.exited(W0, 1, 1.0, RAISED)
    supervisor.tick(2.0)
    assert isinstance(supervisor.exited(W0, 1, 3.0, other)[0], Restart)
    assert isinstance(supervisor.exited(W1, 1, 3.0, RAISED)[0], Restart)
