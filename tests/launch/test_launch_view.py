"""What people see: child lines, the status, the tables of results."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console, RenderableType

from paramserver.common.reporting.report import (
    comparison_table,
    duration,
    regions_text,
    report_console,
    short_number,
    size,
    status_line,
    status_panel,
    summary_table,
)
from paramserver.common.reporting.summary import Status, Summary, WorkerStatus
from paramserver.launch.plan.hosts import SERVER, Child
from paramserver.launch.supervise.supervisor import Finish
from paramserver.launch.view import LineSplitter, LiveScreen, Screen, Series, child_line, parse_event

WORKER_2 = Child("worker", 2)
STATUS = {
    "event": "status",
    "level": "info",
    "program": "ps-server",
    "timestamp": 1.5,
    "mode": "ssp",
    "version": 472,
    "elapsed_s": 3.2,
    "step": 118,
    "steps": 500,
    "num_workers": 2,
    "workers": [
        {"rank": 0, "state": "waiting", "step": 121, "lead": 3, "loss": 0.3, "samples_per_s": 812.0,
         "compute_share": 0.7, "transfer_share": 0.1, "wait_share": 0.2,
         "waiting_for": "lead 3 of at most 3; slowest is rank 2 at step 118"},
        {"rank": 2, "state": "computing", "step": 118, "lead": 0, "loss": None, "samples_per_s": 700.0,
         "compute_share": 1.0, "transfer_share": 0.0, "wait_share": 0.0, "field_of_tomorrow": 1},
    ],
}  # fmt: skip


def status(**changes: object) -> Status:
    event = parse_event(json.dumps({**STATUS, **changes}))
    assert event is not None
    parsed = event.status
    assert parsed is not None
    return parsed


def drawn(renderable: RenderableType, width: int = 100) -> str:
    file = io.StringIO()
    Console(file=file, width=width, highlight=False).print(renderable)
    return file.getvalue()


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ('{"event": "joined", "level": "info", "rank": 0}', "[worker 2] joined rank=0"),
        (
            '{"event": "refused", "level": "error", "why": "not yours", "x": 0.1234567891}',
            "[worker 2] error: refused why='not yours' x=0.123457",
        ),
        (
            '{"event": "oops", "level": "error", "exception": "Traceback:\\n  boom"}',
            "[worker 2] error: oops\nTraceback:\n  boom",
        ),
        (
            '{"event": "left", "reason": "\\u001b[2J", "host": "a\\nb"}',
            "[worker 2] left reason='\\x1b[2J' host='a\\nb'",
        ),
        ("a [bold]print[/bold] of the user's {}", "[worker 2] a [bold]print[/bold] of the user's {}"),
        ('{"loss": 0.1}', '[worker 2] {"loss": 0.1}'),
        ('{"event": 3}', '[worker 2] {"event": 3}'),
        ('{"event":' + "[" * 100_000, '[worker 2] {"event":' + "[" * 100_000),
        ('{"event": "cut off', '[worker 2] {"event": "cut off'),
        ("\x1b[31mred\x1b[0m", "[worker 2] red"),
    ],
)
def test_a_line_of_a_child(line: str, shown: str) -> None:
    assert child_line(WORKER_2, line, parse_event(line)).plain == shown


def test_status_in_one_line() -> None:
    assert status_line(status()) == (
        "step 118/500  version 472  training loss 0.300  1,512 samples/s  10 s to go\n"
        "  waiting: worker 0: lead 3 of at most 3; slowest is rank 2 at step 118"
    )
    starting = status(step=0, version=0, workers=[], waiting="for 4 workers: 3 of 4 joined (missing rank 2)")
    assert status_line(starting) == ("step 0/500  version 0  waiting: for 4 workers: 3 of 4 joined (missing rank 2)")


def test_the_first_line_of_a_status_fits_80_columns_and_names_both_losses() -> None:
    point = {"step": 100, "version": 400, "elapsed_s": 3.0, "metrics": {"accuracy": 0.97, "loss": 0.0612}}
    current = status(step=118_000, steps=500_000, version=47_200_000, evaluated=point, elapsed_s=9_000.0)
    (line, _) = status_line(current).splitlines()
    assert line == "step 118,000/500,000  training loss 0.300  held-out loss 0.061  8 h 05 min to go"
    current = status(evaluated=point)
    assert status_line(current).splitlines()[0] == (
        "step 118/500  training loss 0.300  held-out loss 0.061  10 s to go"
    )
    job = "run 12 of 14, about 2 h 05 min to go"
    for current in (status(evaluated=point), status(evaluated=point, step=10**8, steps=10**9)):
        (line, _) = status_line(current, job).splitlines()
        assert len(line) <= 80 and line.startswith(f"{job}  step ") and "to go" not in line.removeprefix(job)


@pytest.mark.parametrize(
    ("series", "run_s", "eta_s", "shown"),
    [
        (Series(), 3.0, 4.0, ""),
        (Series(1, 3), 0.0, None, "run 1 of 3"),
        (Series(1, 3), 10.0, 30.0, "run 1 of 3, about 2 min to go"),  # 30 and twice 40 s
        (Series(5, 14, (10.0, 20.0, 15.0, 15.0)), 0.0, None, "run 5 of 14, about 2 min to go"),
        (Series(14, 14, (10.0,) * 13), 8.0, 3.0, "run 14 of 14, about 3 s to go"),
        (Series(2, 2, (10.0,)), 18.0, None, "run 2 of 2, about 0 s to go"),
    ],
)
def test_which_run_of_several_it_is(series: Series, run_s: float, eta_s: float | None, shown: str) -> None:
    assert series.text(run_s, eta_s) == shown


def test_the_start_of_training_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen({}, lambda: None)
    for num, line in ((4, "ps-launch: 4 workers joined"), (1, "ps-launch: 1 worker joined")):
        log_line = json.dumps({"event": "training_started", "level": "info", "workers": num, "mode": "ssp"})
        screen.line(SERVER, log_line, parse_event(log_line))
        assert capsys.readouterr().err == f"{line}\n"
    screen.line(WORKER_2, log_line, parse_event(log_line))  # somebody else's word
    assert capsys.readouterr().err.startswith("[worker 2] training_started")


def test_status_as_a_table() -> None:
    lines = drawn(status_panel(status()), 120).splitlines()
    assert all(word in lines[1] for word in ("ssp", "118/500", "version 472", "training loss 0.300", "10 s to go"))
    assert "waiting: worker 0: lead 3 of at most 3" in lines[3]
    assert lines[5].split()[:9] == ["0", "waiting", "121/500", "3", "0.300", "812", "70%", "10%", "20%"]
    assert lines[6].split() == ["2", "computing", "118/500", "0", "-", "700", "100%", "0%", "0%"]


def test_at_80_columns_nothing_is_lost_of_what_a_worker_waits_for() -> None:
    current = status().model_copy(update={"step": 999_000, "steps": 1_000_000, "version": 12_345_678})
    why = "the round 12,345,679 needs 3 of 4 workers; missing rank 2, which is at training step 118"
    rows = [worker.model_copy(update={"step": 999_123, "waiting_for": why}) for worker in current.workers]
    lines = drawn(status_panel(current.model_copy(update={"workers": rows})), 80).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert "…" not in "".join(lines)
    assert [line for line in lines if "999,123/1,000,000" in line and line.rstrip().endswith("%")] != []
    assert f"worker 0, 2 waits for: {why}" in " ".join(line.strip() for line in lines)


@pytest.mark.parametrize(
    "changes",
    [{"workers": 5}, {"workers": [5]}, {"workers": [{}]}, {"step": "x"}, {"workers": [{"rank": "a"}]}, {"mode": 1}],
)
def test_a_status_of_someone_elses_making_is_not_understood(changes: dict[str, object]) -> None:
    event = parse_event(json.dumps({**STATUS, **changes}))
    assert event is not None
    assert event.status is None


def test_lines_come_whole_however_the_bytes_come() -> None:
    splitter = LineSplitter()
    data = "one\ntw\u00f6\r\n 10%\r 20%\nlast".encode()
    lines = [line for index in range(len(data)) for line in splitter.feed(data[index : index + 1])]
    assert lines + splitter.feed(b"") == ["one", "tw\u00f6", " 20%", "last"]
    assert splitter.feed(b"") == []
    assert sum(len(line) for line in splitter.feed(b"x" * 3_000_000)) == 3_000_000  # never kept for ever


def test_last_lines_are_repeated_only_when_they_have_scrolled_away(capsys: pytest.CaptureFixture[str]) -> None:
    screen, written = Screen({}, lambda: None), []
    for num, line, child in ((30, "line {}", WORKER_2), (11, "something else", SERVER), (0, "", Child("worker", 7))):
        for number in range(num):
            screen.line(child, line.format(number), None)
        capsys.readouterr()
        screen.failure(Finish(1, "why", child if child != SERVER else WORKER_2))
        written.append([text for text in capsys.readouterr().err.splitlines() if text.startswith("[")])
    assert written == [[], [f"[worker 2] line {number}" for number in range(10, 30)], []]


def summary(mode: str = "ssp", num_workers: int = 4, **changes: object) -> Summary:
    workers = [
        WorkerStatus(
            rank=rank, training_steps=12_345, contributions=12_345, samples=395_040, staleness_mean=12.34,
            staleness_max=217, lead_max=12,
            compute_s=1234.5, wait_s=1234.5, transfer_s=1234.5, bytes_sent=123_456_789_012,
            bytes_received=123_456_789_012, restarts=rank,
        )
        for rank in range(num_workers)
    ]  # fmt: skip
    fields = {"version": 49_380, "wall_s": 3725.0, "final": {"loss": 0.0821, "accuracy": 0.9722}, **changes}
    return Summary(mode=mode, staleness_bound=3, workers=workers, **fields)  # type: ignore[arg-type]


def test_the_end_of_a_run_fits_100_columns() -> None:
    text = drawn(summary_table(summary()))
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    assert "ssp (staleness 3)   49,380 updates in 1 h 02 min" in text
    assert "loss 0.082   accuracy 0.972" in text
    assert "waiting 33%" in text
    assert text.splitlines()[3].split() == [
        *("worker", "steps", "samples", "s", "s", "s", "mean", "max", "max", "sent", "received", "restarts")
    ]  # without dropped and rejected, which are 0 for everyone
    assert text.count("123 GB") == 8


def test_regions_have_their_names_sizes_and_bytes() -> None:
    """In the table at the end, the live view and the status line; with their numbers alone where they have no names."""
    values = {"bytes_sent": 2e6, "bytes_received": 3e6, "region_workers": 3, "region_bytes": 4e7, "region_ahead": 8}
    relays = [WorkerStatus(rank=rank, region=name, **values) for rank, name in enumerate(("eu", "us"))]
    line = "2 regions: 0 eu (3 workers), 1 us (3 workers); 10.0 MB over borders, 80.0 MB within"
    found = Summary(mode="sync", above="diloco (8 local steps)", version=3, workers=relays)
    text = drawn(summary_table(found))
    assert text.startswith("sync in 2 regions, diloco (8 local steps) above   3 updates")
    assert line in text and "1 us" in text.splitlines()[-1]
    assert max(len(row.rstrip()) for row in text.splitlines()) <= 100
    waiting = relays[0].model_copy(update={"waiting_for": "rank 1"})
    status = Status(mode="sync", workers=[waiting, relays[1]])
    assert status_line(status).endswith("waiting: region eu: rank 1")
    text = drawn(status_panel(status))
    assert line in text and "region eu waits for: rank 1" in text
    unnamed = [relay.model_copy(update={"region": str(relay.rank)}) for relay in relays]
    assert regions_text(unnamed).startswith("2 regions: 0 (3 workers), 1 (3 workers); ")
    assert regions_text([WorkerStatus(rank=0)]) == ""


def test_a_comparison_lines_up_what_runs_have_in_common() -> None:
    alone = summary("single", 1, final={"loss": 0.5, "perplexity": 9.9})
    text = drawn(comparison_table([("single", alone), ("localsgd", summary("localsgd"))]))
    head, first, second = (line.rstrip() for line in text.splitlines())
    assert head.split()[:5] == ["mode", "loss", "perplexity", "accuracy", "wall"]
    assert first.split()[:4] == ["single", "0.500", "9.900", "-"]
    assert second.split()[:4] == ["localsgd", "0.082", "-", "0.972"]
    assert max(map(len, (head, first, second))) <= 100
    assert "steps/s" in head and "version" not in head  # which goes first where it is too wide


def test_nothing_is_cut_in_a_file() -> None:
    file = io.StringIO()
    many = {f"metric_number_{index}": 0.5 for index in range(5)}
    report_console(file).print(comparison_table([("localsgd", summary("localsgd", final=many))]))
    assert len(file.getvalue().splitlines()) == 2
    assert "…" not in file.getvalue()


def test_metrics() -> None:
    assert [short_number(value) for value in (0.0, 0.5, 2.30258, 1e-5, 123_456.0)] == [
        *("0.000", "0.500", "2.303", "1.00e-05", "1.23e+05")
    ]
    assert short_number(float("nan")) == "nan"
    assert [duration(value) for value in (0.04, 9.96, 59.2, 200, 3725)] == [
        *("0.0 s", "10 s", "59 s", "3 min 20 s", "1 h 02 min")
    ]
    assert [size(value) for value in (0, 999, 1500, 123_456, 1e9, 2e15)] == [
        *("0 B", "999 B", "1.5 kB", "123 kB", "1.0 GB", "2,000.0 TB")
    ]


def test_a_server_that_is_down_is_said_in_the_live_view_until_it_reports_again() -> None:
    screen = LiveScreen({}, on_lost=lambda: None)
    try:
        screen.is_down(SERVER)  # nothing was shown yet
        for is_down in (False, True, False):
            if is_down:
                screen.is_down(SERVER)
            else:
                screen.status("", status(), 0.0)
            assert ("waiting: the server is down" in drawn(screen._live.get_renderable())) is is_down
    finally:
        screen.close()
