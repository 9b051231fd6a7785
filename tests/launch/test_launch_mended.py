"""Failures that the launcher mends, and those it does not: real launchers, processes and signals."""

from __future__ import annotations

import json
import re
import signal
import time

import pytest

DEADLINE_S = 120.0
SOON = ("--set", "launch.backoff_s=0.01")
KILLED = "failed: killed by SIGKILL; started again in 0.01 s (restart 1 of 3)"


def test_a_killed_worker_comes_back_and_the_job_goes_well(marked) -> None:
    run = marked.run("-n", "2", *SOON, FAKE_WORKER_1="once kill")
    assert run.returncode == 0
    output = run.stderr.splitlines()
    at = output.index(f"ps-launch: worker 1 {KILLED}")
    lives = [index for index, line in enumerate(output) if line.startswith("[worker 1] joined rank=1")]
    assert len(lives) == 2
    assert lives[0] < at < lives[1]
    assert "loss 0.125" in run.stdout


@pytest.mark.parametrize("how", ["kill", "die 1"])
def test_a_server_with_snapshots_comes_back_where_it_was(how: str, marked) -> None:
    """Told to begin anew, it still goes on from the snapshot that it took itself before it failed."""
    (marked.folder / "kept").mkdir()
    (marked.folder / "kept" / "snapshot").write_text("1")  # of an earlier run
    argv = ("-n", "2", "--checkpoint-dir", "kept", "--resume", "never", *SOON)
    run = marked.run(*argv, FAKE_SERVER=f"once {how}")
    assert run.returncode == 0, run.stderr
    addresses = re.findall(r"\[server\] listening address=(\S+)", run.stderr)
    assert len(addresses) == 2
    assert addresses[0] == addresses[1]
    assert run.stderr.count("[server] resumed num_goodbyes=0") == 1
    assert run.stderr.count("[worker 0] hello") == 1  # workers stay and find it again
    assert "loss 0.125" in run.stdout


def test_a_server_without_snapshots_ends_the_job_and_the_message_says_what_to_do(marked) -> None:
    run = marked.run("-n", "2", *SOON, FAKE_SERVER="kill")
    assert run.returncode == 128 + signal.SIGKILL
    assert run.stderr.splitlines()[-1] == (
        "ps-launch: server failed: killed by SIGKILL; with --checkpoint-dir DIR it would have been started again"
    )


def test_the_root_cause_is_named_last_however_much_is_said(marked, read_until) -> None:
    """The second failure ends the job, the first is named with it, after hundreds of lines."""
    launcher = marked.launch(
        *("-n", "3", "--set", "launch.backoff_s=10"),
        FAKE_WORKER_0="kill", FAKE_WORKER_1="flood 12", FAKE_WORKER_2="flood 143",
    )  # fmt: skip
    read_until(launcher.stderr, "worker 0 failed")
    (marked.folder / "flood").touch()
    _, err = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 12
    *lines, last = err.splitlines()
    assert last == (
        "ps-launch: worker 1 failed: exit code 12 (model or run mismatch);"
        " the first to fail was worker 0: killed by SIGKILL"
    )
    assert len([line for line in lines if "] flood " in line]) >= 500


def test_as_json_a_restart_is_an_event(marked) -> None:
    run = marked.run("-n", "2", "--log-format", "json", *SOON, FAKE_WORKER_1="once kill")
    assert run.returncode == 0
    (restart,) = [event for event in map(json.loads, run.stderr.splitlines()) if event["event"] == "restarting"]
    del restart["timestamp"]
    assert restart == {
        "event": "restarting", "level": "warning", "program": "ps-launch", "reason": f"worker 1 {KILLED}",
        "role": "worker", "rank": 1, "in_s": 0.01, "restart": 1, "of": 3,
    }  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_a_back_off_drains_at_once(number: int, marked, read_until) -> None:
    launcher = marked.launch("-n", "2", "--set", "launch.backoff_s=10", FAKE_WORKER="hang", FAKE_WORKER_1="kill")
    read_until(launcher.stderr, "worker 1 failed", "started again in 10 s")
    asked = time.monotonic()
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=DEADLINE_S)
    assert time.monotonic() - asked < 8  # the back-off would take longer
    assert launcher.returncode == 128 + number
    assert f"{signal.Signals(number).name}: the job ends; asked to end: server, worker 0\n" in err
    assert "hello from 1" not in err
    assert marked.left() == []
