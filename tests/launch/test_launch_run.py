"""Whole jobs: a real launcher, real processes in place of ps-server and ps-worker, real signals."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paramserver.common.reporting.summary import Summary
from paramserver.launch.hosts.agent import num_cores

DEADLINE_S = 120.0
SOON = ("--set", "launch.backoff_s=0.01")
KILLED = "failed: killed by SIGKILL; started again in 0.01 s (restart 1 of 3)"
WORKER = str(Path(__file__).parent / "programs" / "fake_worker.py")


def test_a_run_from_start_to_end(marked) -> None:
    run = marked.run("-n", "3", "--steps", "10", "--set", "launch.status_interval_s=0.001")
    assert run.returncode == 0
    output = run.stderr.splitlines()
    assert output[0] == "ps-launch: sync: a server and 3 workers, 10 steps, batch 32, task digits"
    assert re.fullmatch(r"\[server\] listening address=127\.0\.0\.1:\d+", output[1])
    for rank in range(3):
        assert any(line.startswith(f"[worker {rank}] hello from {rank}") for line in output)
        assert any(line.startswith(f"[worker {rank}] joined rank={rank}") for line in output)
    assert [line for line in output if line.startswith("step ")]
    assert not [line for line in output if "summary" in line or "status" in line]
    table = run.stdout.splitlines()
    assert table[0].startswith("sync   10 updates in 1.2 s")
    assert table[1] == "loss 0.125"
    assert [row.split()[0] for row in table[-3:]] == ["0", "1", "2"]


@pytest.mark.parametrize(("left", "reason"), [("none", "left no results"), ("part", "which are incomplete")])
def test_a_run_without_results_has_failed(left: str, reason: str, marked) -> None:
    run = marked.run("-n", "1", FAKE_RESULTS=left)
    assert (run.returncode, run.stdout) == (14, "")
    assert reason in run.stderr.splitlines()[-1]


def test_a_port_that_is_taken_is_found_before_anything_starts(marked) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = marked.run("-n", "2", "--port", str(taken.getsockname()[1]))
    assert run.returncode == 10
    assert "ps-launch: flag --port: cannot listen on 127.0.0.1" in run.stderr
    assert "starting" not in run.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_drains(number: int, code: int, marked, read_until) -> None:
    launcher = marked.launch("-n", "1", FAKE_WORKER="hang")
    read_until(launcher.stderr, "hanging")
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == code
    assert f"{signal.Signals(number).name}: the job ends; asked to end: server, worker 0" in err
    assert "killed" not in err
    assert marked.left() == []


def test_under_nohup_a_hangup_is_nothing(marked, read_until) -> None:
    marked.on_hangup = signal.SIG_IGN
    launcher = marked.launch("-n", "1", FAKE_WORKER="hang")
    read_until(launcher.stderr, "hanging")
    launcher.send_signal(signal.SIGHUP)
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 143
    assert "SIGTERM: the job ends; asked to end: server, worker 0" in err
    assert "SIGHUP" not in err
    assert marked.left() == []


def test_the_second_signal_kills(marked, read_until) -> None:
    launcher = marked.launch("-n", "1", "--set", "launch.grace_s=60", FAKE_WORKER="stubborn")
    read_until(launcher.stderr, "hanging")
    launcher.send_signal(signal.SIGINT)
    read_until(launcher.stderr, "asked to end")
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 130
    assert re.search("SIGINT while ending; killed: .*worker 0", err)
    assert marked.left() == []


def test_output_that_nobody_reads_ends_the_job(marked, read_until) -> None:
    launcher = marked.launch("-n", "2", FAKE_WORKER="chatty")
    read_until(launcher.stderr, "still here")
    launcher.stderr.close()
    assert launcher.wait(timeout=DEADLINE_S) == 128 + signal.SIGPIPE
    assert marked.left() == []


def test_results_that_nobody_reads_are_no_traceback(marked) -> None:
    launcher = marked.launch("-n", "2")
    launcher.stdout.close()
    err = launcher.stderr.read()
    assert launcher.wait(timeout=DEADLINE_S) == 128 + signal.SIGPIPE
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
    assert marked.left() == []


def test_several_modes_are_compared(marked) -> None:
    argv = ("-n", "2", "--mode", "single,bsp,ssp", "--save", "w.safetensors", "--summary", "all.json")
    run = marked.run(*argv)
    assert run.returncode == 0
    rows = [line.split() for line in run.stdout.splitlines()]
    assert [row[:3] for row in rows[:4]] == [
        *(["mode", "loss", "wall"], ["single", "0.250", "2.5"], ["sync", "0.125", "1.2"], ["ssp", "0.125", "1.2"])
    ]
    assert (
        "Loss at the end: sync is best (not beyond the spread of ssp) with 0.125; ssp 0.125, single 0.250."
        in run.stdout
    )
    heads = [line for line in run.stderr.splitlines() if line.startswith("ps-launch: ")]
    assert "single: one worker alone, no server, 500 steps, batch 64" in heads[0]
    assert "weights to w-sync.safetensors" in heads[1]
    runs = json.loads((marked.folder / "all.json").read_text())["runs"]
    assert [Summary.model_validate(summary).mode for summary in runs] == ["single", "sync", "ssp"]


def test_each_mode_runs_with_each_seed_and_a_report_is_written(marked) -> None:
    run = marked.run("-n", "2", "--mode", "single,sync", "--seeds", "2", "--set", "run.seed=5", "--report", "out/put")
    assert run.returncode == 0, run.stderr
    rows = [line.split("  ")[0] for line in run.stdout.splitlines()]
    assert rows[:5] == ["mode", "single, seed 5", "single, seed 6", "sync, seed 5", "sync, seed 6"]
    assert rows[-1] == "the report is out/put/report.html"
    heads = [line for line in run.stderr.splitlines() if line.startswith("ps-launch: ")]
    assert "sync, seed 6: a server and 2 workers" in heads[3]
    html = (marked.folder / "out/put/report.html").read_text()
    assert (
        "<h1><span>task digits</span></h1>" in html and "Seconds in all: sync is best with 1.2 s; single 2.5 s." in html
    )


def test_a_failing_mode_ends_the_comparison_and_keeps_what_there_is(marked) -> None:
    argv = ("-n", "2", "--mode", "sync,ssp,async", "--summary", "all.json")
    run = marked.run(*argv, FAKE_SERVER_ssp="exit 13")
    assert run.returncode == 13
    assert [line.split()[0] for line in run.stdout.splitlines()] == ["mode", "sync"]
    assert "async" not in run.stderr
    assert len(json.loads((marked.folder / "all.json").read_text())["runs"]) == 1


@pytest.mark.parametrize(("chosen", "found"), [("3", 3), ("", max(1, num_cores() // 2))])
def test_a_script_of_ones_own(chosen: str, found: int, marked) -> None:
    run = marked.run("-n", "2", WORKER, "--epochs", "3", OMP_NUM_THREADS=chosen)
    assert run.returncode == 0
    for rank in range(2):
        assert f"[worker {rank}] hello from {rank}, arguments ['--epochs', '3']" in run.stderr
    assert run.stderr.count(f"threads={found}") == 2, "as somebody has chosen, or a share of the cores"


def test_a_script_that_never_joins_is_no_success(marked) -> None:
    (marked.folder / "own.py").write_text("print('trained alone')")
    run = marked.run("-n", "2", "own.py")
    assert run.returncode == 2
    assert "the script ended and never joined the run: it called no paramserver.connect()" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("line", ["os.environ['LOCAL_RANK']", "torch.distributed.init_process_group('gloo')"])
def test_a_script_for_a_process_group_gets_one_sentence(marked, line: str) -> None:
    (marked.folder / "ddp.py").write_text(f"import os, torch\nx = {line}\n")
    run = marked.run("-n", "1", "ddp.py")
    assert run.returncode == 1
    assert "RANK is not set: a worker of ps-launch is not a rank of a process group" in run.stderr
    assert "restart 1" not in run.stderr


def test_as_json_every_line_is_an_object(marked) -> None:
    run = marked.run("-n", "2", "--log-format", "json", FAKE_WORKER="hang", FAKE_WORKER_1="exit 12")
    events = [json.loads(line) for line in run.stderr.splitlines()]
    assert run.returncode == 12
    assert {"starting", "listening", "status", "joined", "output", "draining", "failed"} <= {
        event["event"] for event in events
    }
    assert [event["role"] for event in events if event["event"] == "listening"] == ["server"]
    assert {event["rank"] for event in events if event["event"] == "output"} == {0, 1}
    assert events[-1]["reason"] == "worker 1 failed: exit code 12 (model or run mismatch)"


def test_on_a_terminal_there_is_a_live_table_and_the_job_ends_when_it_is_closed(marked, read_until) -> None:
    terminal, slave = pty.openpty()
    launcher = subprocess.Popen(
        [sys.executable, marked.launcher, "-n", "2", "--set", "launch.backoff_s=0.01"],
        env={
            **os.environ, "PS_TEST_MARK": marked.mark, "TERM": "xterm", "COLUMNS": "100", "FAKE_WORKER": "chatty",
            "FAKE_WORKER_1": "once kill",
        },
        cwd=marked.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
    )  # fmt: skip
    os.close(slave)
    shown = ""
    while "computing" not in shown.partition("(restart 1 of 3)")[2]:  # and the table goes on
        shown += os.read(terminal, 65536).decode(errors="replace")
    assert "worker 1 failed: killed by SIGKILL" in shown
    assert "samples/s" in shown
    assert "\x1b[" in shown
    os.close(terminal)
    assert launcher.wait(timeout=DEADLINE_S) == 128 + signal.SIGPIPE
    assert marked.left() == []


# ---- failures that a restart mends ---------------------------------------------------------------------


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


def test_as_json_a_restart_is_an_event(marked) -> None:
    run = marked.run("-n", "2", "--log-format", "json", *SOON, FAKE_WORKER_1="once kill")
    assert run.returncode == 0
    (restart,) = [event for event in map(json.loads, run.stderr.splitlines()) if event["event"] == "restarting"]
    del restart["timestamp"]
    assert restart == {
        "event": "restarting", "level": "warning", "program": "ps-launch", "reason": f"worker 1 {KILLED}",
        "role": "worker", "rank": 1, "in_s": 0.01, "restart": 1, "of": 3,
    }  # fmt: skip
