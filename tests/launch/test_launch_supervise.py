"""What the launcher decides, as transcripts: `event -> decisions` with a grace time of 10 s."""

from __future__ import annotations

import pytest

from paramserver.launch.plan import SERVER, Child
from paramserver.launch.supervise import Decision, Finish, Supervisor

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
    "a killed worker is reported as a shell does": """
        begin                    -> start server (the workers need its address)
        listening                -> start worker 0, start worker 1 (the server is listening)
        exit worker 0 -9 at 5    -> end server, end worker 1 (worker 0 failed: killed by SIGKILL)
        exit server 0 at 6       ->
        exit worker 1 -15 at 6   -> finish 137 (worker 0 failed: killed by SIGKILL)
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
    "the server cannot bind": """
        begin                    -> start server (the workers need its address)
        exit server 10 at 1      -> finish 10 (server failed: exit code 10 (cannot listen on the address))
    """,
    "the server ends without a word": """
        begin                    -> start server (the workers need its address)
        exit server 0 at 1       -> finish 1 (server ended before it was listening)
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
        tick at 152              -> kill server (the server was told to end and was still there after 100 s)
        exit server -9 at 152    -> finish 1 (the server was told to end and was still there after 100 s)
    """,
    "a server that fails while writing its results": """
        begin                    -> start server (the workers need its address)
        listening                -> start worker 0, start worker 1 (the server is listening)
        exit worker 0 0 at 50    ->
        exit worker 1 0 at 50    ->
        exit server 14 at 51     -> finish 14 (server failed: exit code 14 (a file cannot be written or read))
    """,
}


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_transcript(name: str) -> None:
    supervisor = Supervisor(num_workers=2, grace_s=10.0)
    expected = [line.strip() for line in TRANSCRIPTS[name].strip().splitlines()]
    played = []
    for line in expected:
        event = line.partition("->")[0]
        played.append(f"{event}-> {show(play(supervisor, event.split()))}".rstrip())
    assert played == expected


def play(supervisor: Supervisor, words: list[str]) -> list[Decision]:
    now = float(words[words.index("at") + 1]) if "at" in words else 0.0
    match words:
        case ["begin"]:
            return supervisor.begin()
        case ["listening"]:
            return supervisor.listening()
        case ["exit", "server", code, *_]:
            return supervisor.exited(SERVER, int(code), now)
        case ["exit", "worker", rank, code, *_]:
            return supervisor.exited(Child("worker", int(rank)), int(code), now)
        case ["interrupt", number, *_]:
            return supervisor.interrupt(int(number), now)
        case ["tick", *_]:
            return supervisor.tick(now)
    raise AssertionError(words)


def show(decisions: list[Decision]) -> str:
    verbs = {"Start": "start", "Terminate": "end", "Kill": "kill"}
    words = [
        f"finish {decision.exit_code}"
        if isinstance(decision, Finish)
        else f"{verbs[type(decision).__name__]} {decision.child}"
        for decision in decisions
    ]
    reasons = dict.fromkeys(decision.reason for decision in decisions)
    return ", ".join(words) + (f" ({'; '.join(reasons)})" if decisions else "")


def test_without_a_server_the_worker_is_the_job() -> None:
    supervisor = Supervisor(num_workers=1, with_server=False)
    assert show(supervisor.begin()) == "start worker 0 (there is no server to wait for)"
    finish = supervisor.exited(Child("worker", 0), 0, 5.0)
    assert show(finish) == "finish 0 (every process ended with exit code 0)"


def test_exit_code_1_of_a_script_is_not_called_our_bug() -> None:
    supervisor = Supervisor(num_workers=1, with_server=False, is_script=True)
    supervisor.begin()
    finish = supervisor.exited(Child("worker", 0), 1, 5.0)
    assert show(finish) == "finish 1 (worker 0 failed: exit code 1 (the script failed))"
