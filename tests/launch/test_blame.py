"""Whose exception ended a process: shown once, and a second time at the same place ends the job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paramserver.launch.plan.hosts import Child
from paramserver.launch.supervise.restarts import Blame, Raised

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


TRACEBACK = ["Traceback (most recent call last):", '  File "train.py", line 9, in f', "    bad()", RAISED.text]


def having_raised() -> Blame:
    """What is known once worker 0 has printed a traceback."""
    blame = Blame()
    blame.started(W0)
    assert [blame.read(W0, line) for line in TRACEBACK] == [[], [], [], TRACEBACK]
    return blame


def test_the_same_of_another_process_is_one_line() -> None:
    blame = having_raised()
    assert blame.read(W1, json.dumps("other output")) == ['"other output"']
    again = [*TRACEBACK[:-1], "ValueError: bad batch 8"]
    assert [blame.read(W1, line) for line in again] == [
        [], [], [], ["ValueError: bad batch 8 (train.py, line 9): the same as above"]
    ]  # fmt: skip
    assert blame.read(W0, TRACEBACK[0]) == []
    assert blame.rest(W0) == [TRACEBACK[0]]
    assert blame.rest(W0) == []


def test_an_exception_that_the_process_has_handled_did_not_end_it() -> None:
    blame = having_raised()
    blame.connected(W0)
    assert W0 not in blame.last
    for line in TRACEBACK:
        blame.read(W0, line)
    assert blame.last[W0] == RAISED
    assert blame.read(W0, "going on without the cache") == ["going on without the cache"]
    assert W0 not in blame.last


@pytest.mark.parametrize("has_said_so", [False, True])
def test_what_ended_a_script_is_named_whatever_it_prints_at_its_exit(has_said_so: bool) -> None:
    """It has not connected, or has said that nothing catches the exception."""
    blame = having_raised()
    if has_said_so:
        blame.uncaught(W0)
    blame.read(W0, "the tracker has written its files")
    assert blame.last[W0] == RAISED
