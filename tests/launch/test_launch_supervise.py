"""What the launcher decides, as transcripts: `event -> decisions` with a grace time of 10 s.

What holds for any sequence of events is in test_launch_restarts.py.
"""

from __future__ import annotations

import pytest

from paramserver.launch.plan.process import SERVER, Child
from paramserver.launch.supervise.supervisor import JobSettings, Supervisor, Terminate

TRANSCRIPTS = {
    "everything goes well": """
        begin                    -> start server (the workers need its address)
        listening                -> start worker 0, start worker 1 (the server is listening)
        listening                ->
        exit worker 1 0 at 50    ->
        exit worker 0 0 at 51    ->
        exit server 0 at 52      -> finish 0 (every process ended with exit code 0)
    """,
    "the server may end before its workers": """
        begin                    -> start server (the workers need its address)
        listening                -> start worker 0, start worker 1 (the server is listening)
        exit server 0 at 50      ->
        exit worker 0 0 at 51    ->
        exit worker 1 0 at 51    -> finish 0 (every process ended with exit code 0)
    """,
    "the first failure is the root cause, what follows from it is not": """
        begin                    -> start server (the workers need its address)
        listening                -> start worker 0, start worker 1 (the server is listening)
        exit worker 1 12 at 5    -> end server, end worker 0 (worker 1 failed: exit code 12 (model or run mismatch))
        exit worker 0 143 at 6   ->
        exit server 15 at 7      -> finish 12 (worker 1 failed: exit code 12 (model or run mismatch))
    """,
    "a server that was asked to end by someone else ends the job: its workers have been sent away": """
        begin                    -> start server (the workers need its address)
        listening                -> start worker 0, start worker 1 (the server is listening)
        exit server 143 at 5     -> end worker 0, end worker 1 (server failed: exit code 143 (drained on SIGTERM))
        exit worker 0 15 at 6    ->
        exit worker 1 -15 at 6   -> finish 143 (server failed: exit code 143 (drained on SIGTERM))
    """,
    "who does not end in time is killed": """
        begin                    -> start server (the workers need its address)
        listening                -> start worker 0, start worker 1 (the server is listening)
        exit worker 1 16 at 5    -> end server, end worker 0 (worker 1 failed: exit code 16 (diverged))
        exit server 143 at 6     ->
        tick at 14.9             ->
        tick at 15               -> kill worker 0 (still there after 10 s)
        tick at 99               ->
        exit worker 0 -9 at 99   -> finish 16 (worker 1 failed: exit code 16 (diverged))
    """,
    "who writes results is given longer": """
        begin                    -> start server (the workers need its address)
        listening                -> start worker 0, start worker 1 (the server is listening)
        exit worker 1 16 at 5    -> end server, end worker 0 (worker 1 failed: exit code 16 (diverged))
        tick at 15               -> kill worker 0 (still there after 10 s)
        exit worker 0 -9 at 15   ->
        tick at 104.9            ->
        tick at 105              -> kill server (still there after 100 s)
        exit server -9 at 105    -> finish 16 (worker 1 failed: exit code 16 (diverged))
    """,
    "the server cannot bind": """
        begin                    -> start server (the workers need its address)
        exit server 10 at 1      -> finish 10 (server failed: exit code 10 (cannot listen on the address))
    """,
    "the server ends without a word": """
        begin                    -> start server (the workers need its address)
        exit server 0 at 1       -> finish 1 (server failed: exit code 0 before it was listening)
    """,
    "Ctrl-C drains": """
        begin                    -> start server (the workers need its address)
        listening                -> start worker 0, start worker 1 (the server is listening)
        interrupt 2 at 5         -> end server, end worker 0, end worker 1 (SIGINT: the job ends)
        exit worker 0 143 at 6   ->
        exit worker 1 0 at 6     ->
        exit server 143 at 7     -> finish 130 (interrupted by SIGINT)
    """,
    "a second Ctrl-C kills": """
        begin                    -> start server (the workers need its address)
        listening                -> start worker 0, start worker 1 (the server is listening)
        interrupt 2 at 5         -> end server, end worker 0, end worker 1 (SIGINT: the job ends)
        exit worker 0 143 at 6   ->
        interrupt 2 at 6.5       -> kill server, kill worker 1 (SIGINT while ending)
        exit server -9 at 6.5    ->
        exit worker 1 -9 at 6.5  -> finish 130 (interrupted by SIGINT)
    """,
    "SIGTERM before there is anything but the server": """
        begin                    -> start server (the workers need its address)
        interrupt 15 at 1        -> end server (SIGTERM: the job ends)
        listening                ->
        exit server 143 at 2     -> finish 143 (interrupted by SIGTERM)
    """,
    "Ctrl-C while the others of a failure are ending kills them": """
        begin                    -> start server (the workers need its address)
        listening                -> start worker 0, start worker 1 (the server is listening)
        exit worker 0 13 at 5    -> end server, end worker 1 (worker 0 failed: exit code 13 (not admitted or evicted))
        interrupt 2 at 6         -> kill server, kill worker 1 (SIGINT while ending)
        exit server -9 at 6      ->
        exit worker 1 -9 at 6    -> finish 13 (worker 0 failed: exit code 13 (not admitted or evicted))
    """,
    "a server that does not notice that all workers are done is told": """
        begin                    -> start server (the workers need its address)
        listening                -> start worker 0, start worker 1 (the server is listening)
        exit worker 0 0 at 50    ->
        exit worker 1 0 at 50    ->
        tick at 51.9             ->
        tick at 52               -> end server (every worker is done)
        exit server 143 at 53    -> finish 0 (every process ended with exit code 0)
    """,
    "and killed much later, since it may be writing large weights": """
        begin                    -> start server (the workers need its address)
        listening                -> start worker 0, start worker 1 (the server is listening)
        exit worker 0 0 at 50    ->
        exit worker 1 0 at 50    ->
        tick at 52               -> end server (every worker is done)
        tick at 151.9            ->
        tick at 152              -> kill server (the server did not end within 100 s)
        exit server -9 at 152    -> finish 1 (the server did not end within 100 s)
    """,
    "a server that fails while writing its results": """
        begin                    -> start server (the workers need its address)
        listening                -> start worker 0, start worker 1 (the server is listening)
        exit worker 0 0 at 50    ->
        exit worker 1 0 at 50    ->
        exit server 14 at 51     -> finish 14 (server failed: exit code 14 (a file cannot be written or read))
    """,
}

UP = """
        begin                    -> start server (the workers need its address)
        listening                -> start worker 0, start worker 1 (the server is listening)
"""
RESTARTS = {
    "a killed worker is started again after the back-off, and the job goes well": """
        exit worker 1 -9 at 5    -> await worker 1 for 0.5 s, restart 1 of 3
        tick at 5.4              ->
        tick at 5.5              -> start worker 1 (restart 1 of 3)
        tick at 7                ->
        exit worker 0 0 at 50    ->
        exit worker 1 0 at 51    ->
        exit server 0 at 52      -> finish 0 (every process ended with exit code 0)
    """,
    "a worker that dies at every start: longer and longer waits, then the end": """
        exit worker 1 1 at 5     -> await worker 1 for 0.5 s, restart 1 of 3
        tick at 5.5              -> start worker 1 (restart 1 of 3)
        exit worker 1 -6 at 6    -> await worker 1 for 1 s, restart 2 of 3
        tick at 6.9              ->
        tick at 7                -> start worker 1 (restart 2 of 3)
        exit worker 1 15 at 8    -> await worker 1 for 2 s, restart 3 of 3
        tick at 10               -> start worker 1 (restart 3 of 3)
        exit worker 1 3 at 11    -> end server, end worker 0 (worker 1 failed: exit code 3; restarts spent: 3)
        exit server 0 at 12      ->
        exit worker 0 143 at 12  -> finish 17 (worker 1 failed: exit code 3; restarts spent: 3)
    """,
    "who has run well for a minute begins to count anew": """
        exit worker 1 -9 at 5    -> await worker 1 for 0.5 s, restart 1 of 3
        tick at 6                -> start worker 1 (restart 1 of 3)
        exit worker 1 -9 at 65.9 -> await worker 1 for 1 s, restart 2 of 3
        tick at 67               -> start worker 1 (restart 2 of 3)
        exit worker 1 -9 at 127  -> await worker 1 for 0.5 s, restart 1 of 3
    """,
    "a killed server is started again, its workers stay": """
        exit server -9 at 5      -> await server for 0.5 s, restart 1 of 3
        tick at 5.5              -> start server (restart 1 of 3)
        listening at 7           ->
        exit worker 0 0 at 50    ->
        exit worker 1 0 at 51    ->
        exit server 0 at 52      -> finish 0 (every process ended with exit code 0)
    """,
    "its port may be taken for a moment": """
        exit server -9 at 5      -> await server for 0.5 s, restart 1 of 3
        tick at 5.5              -> start server (restart 1 of 3)
        exit server 10 at 6      -> await server for 1 s, restart 2 of 3
    """,
    "a worker that gives up while the server is away comes back too": """
        exit server -9 at 5      -> await server for 0.5 s, restart 1 of 3
        exit worker 0 15 at 5.2  -> await worker 0 for 0.5 s, restart 1 of 3
        tick at 5.6              -> start server (restart 1 of 3)
        tick at 5.7              -> start worker 0 (restart 1 of 3)
    """,
    "a failure that no restart mends ends the job at once; the first to fail is named": """
        exit server -9 at 5      -> await server for 0.5 s, restart 1 of 3
        exit worker 1 12 at 5.2  -> end worker 0 (worker 1 failed: exit code 12 (model or run mismatch); first: server)
        tick at 5.6              ->
        exit worker 0 143 at 6   -> finish 12 (worker 1 failed: exit code 12 (model or run mismatch); first: server)
    """,
    "unless that one has run well since": """
        exit worker 0 -9 at 5    -> await worker 0 for 0.5 s, restart 1 of 3
        tick at 5.5              -> start worker 0 (restart 1 of 3)
        exit worker 1 12 at 66   -> end server, end worker 0 (worker 1 failed: exit code 12 (model or run mismatch))
    """,
    "when the server has ended well, who waits is not needed any more": """
        exit worker 1 -9 at 5    -> await worker 1 for 0.5 s, restart 1 of 3
        exit server 0 at 5.1     ->
        tick at 6                ->
        exit worker 0 0 at 7     -> finish 0 (the server ended with exit code 0: the run is complete)
    """,
    "but who ended in a code of its own had failed after its goodbye": """
        exit worker 1 3 at 5     -> await worker 1 for 0.5 s, restart 1 of 3
        exit server 0 at 5.1     ->
        exit worker 0 0 at 7     -> finish 3 (worker 1 failed: exit code 3)
    """,
    "what fails at the end ends the job, and nothing is started again": """
        exit worker 1 1 at 5     -> await worker 1 for 0.5 s, restart 1 of 3
        failed 1 1 at 5.1        ->
        tick at 6                ->
        exit server 1 at 6       ->
        exit worker 0 0 at 7     -> finish 1 (no such metric)
    """,
    "also where the server says so first": """
        failed 1 1 at 5          ->
        exit worker 1 1 at 5.1   ->
        exit server 1 at 6       ->
        tick at 105              -> kill worker 0 (still there after 100 s)
        exit worker 0 -9 at 105  -> finish 1 (no such metric)
    """,
    "and who came back too late finds nobody": """
        exit worker 1 -9 at 5    -> await worker 1 for 0.5 s, restart 1 of 3
        tick at 6                -> start worker 1 (restart 1 of 3)
        exit server 0 at 6.1     -> end worker 1 (the server ended with exit code 0: the run is complete)
        exit worker 1 143 at 6.2 ->
        exit worker 0 0 at 67    -> finish 0 (the server ended with exit code 0: the run is complete)
    """,
    "but what it had failed with is not forgotten": """
        exit worker 1 1 at 5     -> await worker 1 for 0.5 s, restart 1 of 3
        tick at 6                -> start worker 1 (restart 1 of 3)
        exit server 0 at 6.1     -> end worker 1 (the server ended with exit code 0: the run is complete)
        exit worker 1 15 at 6.2  ->
        exit worker 0 0 at 7     -> finish 1 (worker 1 failed: exit code 1 (an exception))
    """,
    "also where the server has sent it away": """
        exit worker 1 1 at 5     -> await worker 1 for 0.5 s, restart 1 of 3
        tick at 6                -> start worker 1 (restart 1 of 3)
        exit worker 0 0 at 6.1   ->
        exit worker 1 0 at 6.2   ->
        exit server 0 at 7       -> finish 1 (worker 1 failed: exit code 1 (an exception))
    """,
    "who was let in again ends by itself": """
        exit worker 1 1 at 5     -> await worker 1 for 0.5 s, restart 1 of 3
        tick at 6                -> start worker 1 (restart 1 of 3)
        admitted 1 at 7          ->
        exit server 0 at 8       ->
        exit worker 1 0 at 66    ->
        exit worker 0 0 at 67    -> finish 0 (every process ended with exit code 0)
    """,
    "who was there all the time should have found it": """
        exit server 0 at 5       ->
        exit worker 1 15 at 65   -> end worker 0 (worker 1 failed: exit code 15 (the peer cannot be reached))
    """,
    "and who fails after it cannot be helped": """
        exit server 0 at 5       ->
        exit worker 1 -9 at 5    -> end worker 0 (worker 1 failed: killed by SIGKILL)
        exit worker 0 0 at 6     -> finish 137 (worker 1 failed: killed by SIGKILL)
    """,
    "the last worker of all may fail and come back": """
        exit worker 0 0 at 50    ->
        exit worker 1 -9 at 51   -> await worker 1 for 0.5 s, restart 1 of 3
        tick at 51.5             -> start worker 1 (restart 1 of 3)
        exit worker 1 0 at 55    ->
        exit server 0 at 56      -> finish 0 (every process ended with exit code 0)
    """,
    "a server that waits when its last worker is done has nobody to serve": """
        exit worker 0 0 at 50    ->
        exit server -9 at 50     -> await server for 0.5 s, restart 1 of 3
        exit worker 1 0 at 50    -> finish 137 (server failed: killed by SIGKILL)
    """,
    "Ctrl-C during a back-off": """
        exit worker 1 -9 at 5    -> await worker 1 for 0.5 s, restart 1 of 3
        interrupt 2 at 5.1       -> end server, end worker 0 (SIGINT: the job ends)
        tick at 5.6              ->
        interrupt 2 at 5.7       -> kill server, kill worker 0 (SIGINT while ending)
        exit server -9 at 5.8    ->
        exit worker 0 -9 at 5.8  -> finish 130 (interrupted by SIGINT)
    """,
    "Ctrl-C while all that there was waits to be started again": """
        exit worker 0 0 at 5     ->
        exit worker 1 -9 at 5    -> await worker 1 for 0.5 s, restart 1 of 3
        exit server -9 at 5      -> await server for 0.5 s, restart 1 of 3
        interrupt 15 at 5.1      -> finish 143 (interrupted by SIGTERM)
    """,
}  # fmt: skip
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
    check_transcript(Supervisor(JobSettings(num_workers=2, grace_s=10.0, keeps_snapshots=True)), TRANSCRIPTS[name])


@pytest.mark.parametrize("name", RESTARTS)
def test_transcript_with_restarts(name: str, check_transcript) -> None:
    supervisor = Supervisor(
        JobSettings(num_workers=2, grace_s=10.0, keeps_snapshots=True, max_restarts=3, backoff_s=0.5)
    )
    check_transcript(supervisor, UP + RESTARTS[name])


def test_a_server_without_snapshots_is_not_started_again(check_transcript) -> None:
    check_transcript(Supervisor(JobSettings(num_workers=2)), UP + WITHOUT_SNAPSHOTS)
    transcript = """
        begin                    -> start server (the workers need its address)
        exit server 1 at 1       -> finish 1 (server failed: exit code 1 (an exception))
    """
    check_transcript(Supervisor(JobSettings(num_workers=2)), transcript)


def test_without_restarts_the_first_failure_ends_the_job_with_its_own_code(check_transcript) -> None:
    check_transcript(Supervisor(JobSettings(num_workers=2, max_restarts=0)), UP + WITHOUT_RESTARTS)


def test_a_server_that_fails_before_it_listens_is_started_again_too(check_transcript) -> None:
    supervisor = Supervisor(JobSettings(num_workers=1, keeps_snapshots=True, max_restarts=1, backoff_s=0.5))
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
    supervisor = Supervisor(JobSettings(num_workers=1, num_shards=0))
    (start,) = supervisor.begin(0.0)
    assert (str(start.child), start.reason) == ("worker 0", "there is no server to wait for")
    (finish,) = supervisor.exited(Child("worker", 0), 0, 5.0)
    assert (finish.exit_code, finish.reason) == (0, "every process ended with exit code 0")


def test_a_worker_without_a_server_has_nothing_to_come_back_to() -> None:
    supervisor = Supervisor(JobSettings(num_workers=1, num_shards=0))
    supervisor.begin(0.0)
    (finish,) = supervisor.exited(Child("worker", 0), -9, 5.0)
    assert (finish.exit_code, finish.reason) == (137, "worker 0 failed: killed by SIGKILL")


def test_exit_code_1_of_a_script_is_not_called_our_bug() -> None:
    supervisor = Supervisor(JobSettings(num_workers=1, num_shards=0, is_script=True))
    supervisor.begin(0.0)
    (finish,) = supervisor.exited(Child("worker", 0), 1, 5.0)
    assert (finish.exit_code, finish.reason) == (1, "worker 0 failed: exit code 1 (the script failed)")


@pytest.mark.parametrize("have_listened", [False, True])
def test_a_run_that_is_done_already_starts_nobody_and_is_no_failure(have_listened: bool) -> None:
    supervisor = Supervisor(JobSettings(num_workers=2))
    supervisor.begin(0.0)
    running = [SERVER]
    if have_listened:
        supervisor.listening(SERVER, 0.5)
        running += [start.child for start in supervisor.may_train(0.5)]
    decisions = supervisor.already_done("all is done", 1.0)
    assert {(type(told), told.child) for told in decisions} == {(Terminate, child) for child in running}
    assert supervisor.listening(SERVER, 1.1) == supervisor.may_train(1.1) == []
    *_, finish = [found for child in running[::-1] for found in supervisor.exited(child, 143, 2.0)]
    assert (finish.exit_code, finish.reason) == (0, "all is done")
