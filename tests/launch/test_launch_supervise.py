"""What the launcher decides, as transcripts: `event -> decisions` with a grace time of 10 s.

What holds for any sequence of events is in test_launch_restarts.py.
"""

from __future__ import annotations

import pytest

from paramserver.launch.plan.process import SERVER, Child
from paramserver.launch.supervise.supervisor import Supervisor, Terminate
from paramserver.tests.launch.transcripts import transcripts

TRANSCRIPTS = transcripts("first_starts.txt")

UP = """
        begin                    -> start server (the workers need its address)
        listening                -> start worker 0, start worker 1 (the server is listening)
"""
RESTARTS = transcripts("restarts.txt")
WITHOUT_SNAPSHOTS = """
        exit server -9 at 5      -> end worker 0, end worker 1 (server failed: killed by SIGKILL; no snapshots)
        exit worker 0 143 at 5   ->
        exit worker 1 143 at 5   -> finish 137 (server failed: killed by SIGKILL; no snapshots)
"""
WITHOUT_RESTARTS = """
        exit worker 0 -9 at 5    -> end server, end worker 1 (worker 0 failed: killed by SIGKILL)
        exit server 0 at 6       ->
        exit worker 1 -15 at 6   -> finish 137 (worker 0 failed: killed by SIGKILL)
"""


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_transcript(name: str, check_transcript) -> None:
    check_transcript(Supervisor(num_workers=2, grace_s=10.0, keeps_snapshots=True), TRANSCRIPTS[name])


@pytest.mark.parametrize("name", RESTARTS)
def test_transcript_with_restarts(name: str, check_transcript) -> None:
    supervisor = Supervisor(num_workers=2, grace_s=10.0, keeps_snapshots=True, max_restarts=3, backoff_s=0.5)
    check_transcript(supervisor, UP + RESTARTS[name])


def test_a_server_without_snapshots_is_not_started_again(check_transcript) -> None:
    check_transcript(Supervisor(num_workers=2), UP + WITHOUT_SNAPSHOTS)
    transcript = """
        begin                    -> start server (the workers need its address)
        exit server 1 at 1       -> finish 1 (server failed: exit code 1 (an exception))
    """
    check_transcript(Supervisor(num_workers=2), transcript)


def test_without_restarts_the_first_failure_ends_the_job_with_its_own_code(check_transcript) -> None:
    check_transcript(Supervisor(num_workers=2, max_restarts=0), UP + WITHOUT_RESTARTS)


def test_a_server_that_fails_before_it_listens_is_started_again_too(check_transcript) -> None:
    supervisor = Supervisor(num_workers=1, keeps_snapshots=True, max_restarts=1, backoff_s=0.5)
    transcript = """
        begin                    -> start server (the workers need its address)
        exit server -9 at 1      -> await server for 0.5 s, restart 1 of 1
        tick at 1.5              -> start server (restart 1 of 1)
        listening at 2           -> start worker 0 (the server is listening)
        exit server 1 at 3       -> end worker 0 (server failed: exit code 1 (an exception); restarts spent: once)
        exit worker 0 15 at 4    -> finish 17 (server failed: exit code 1 (an exception); restarts spent: once)
    """
    check_transcript(supervisor, transcript)


def test_without_a_server_the_worker_is_the_job() -> None:
    supervisor = Supervisor(num_workers=1, num_shards=0)
    (start,) = supervisor.begin(0.0)
    assert (str(start.child), start.reason) == ("worker 0", "there is no server to wait for")
    (finish,) = supervisor.exited(Child("worker", 0), 0, 5.0)
    assert (finish.exit_code, finish.reason) == (0, "every process ended with exit code 0")


def test_a_worker_without_a_server_has_nothing_to_come_back_to() -> None:
    supervisor = Supervisor(num_workers=1, num_shards=0)
    supervisor.begin(0.0)
    (finish,) = supervisor.exited(Child("worker", 0), -9, 5.0)
    assert (finish.exit_code, finish.reason) == (137, "worker 0 failed: killed by SIGKILL")


def test_exit_code_1_of_a_script_is_not_called_our_bug() -> None:
    supervisor = Supervisor(num_workers=1, num_shards=0, is_script=True)
    supervisor.begin(0.0)
    (finish,) = supervisor.exited(Child("worker", 0), 1, 5.0)
    assert (finish.exit_code, finish.reason) == (1, "worker 0 failed: exit code 1 (the script failed)")


@pytest.mark.parametrize("have_listened", [False, True])
def test_a_run_that_is_done_already_starts_nobody_and_is_no_failure(have_listened: bool) -> None:
    supervisor = Supervisor(num_workers=2)
    supervisor.begin(0.0)
    running = [SERVER]
    if have_listened:
        supervisor.listening(SERVER, 0.5)
        running += [start.child for start in supervisor.may_train(0.5)]
    decisions = supervisor.already_done("all is done", 1.0)
    assert {(type(decision), decision.child) for decision in decisions} == {(Terminate, child) for child in running}
    assert supervisor.listening(SERVER, 1.1) == supervisor.may_train(1.1) == []
    *_, finish = [found for child in running[::-1] for found in supervisor.exited(child, 143, 2.0)]
    assert (finish.exit_code, finish.reason) == (0, "all is done")


def test_the_end_of_ps_serve_ends_no_job_and_it_ends_last(check_transcript) -> None:
    transcript = """
        begin                    -> start server (the workers need its address)
        listening                -> start worker 0, start serve (the server is listening)
        exit serve -9 at 1       -> await serve for 0.5 s, restart 1 of 1
        tick at 1.5              -> start serve (restart 1 of 1)
        exit worker 0 0 at 3     ->
        exit server 0 at 4       -> kill serve (every process ended with exit code 0)
        exit serve -9 at 4       -> finish 0 (every process ended with exit code 0)
    """
    settings = {"num_workers": 1, "has_serve": True, "max_restarts": 1, "backoff_s": 0.5}
    check_transcript(Supervisor(**settings), transcript)
    spent = """
        exit serve -9 at 2       ->
        exit worker 0 0 at 3     ->
        exit server 0 at 4       -> finish 0 (every process ended with exit code 0)
    """
    check_transcript(Supervisor(**settings), "\n".join(transcript.splitlines()[:5]) + spent)


def test_a_failure_of_ps_serve_is_no_reason_of_another_s(check_transcript) -> None:
    transcript = """
        begin                    -> start server (the workers need its address)
        listening                -> start worker 0, start serve (the server is listening)
        exit serve 12 at 1       ->
        exit server -9 at 2      -> end worker 0 (server failed: killed by SIGKILL; no snapshots)
        exit worker 0 143 at 2   -> finish 137 (server failed: killed by SIGKILL; no snapshots)
    """
    check_transcript(Supervisor(num_workers=1, has_serve=True), transcript)
