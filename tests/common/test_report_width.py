"""Tables at 80 columns: fewer columns, and no word is broken."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.common.reporting.report import FittingTable, comparison_table, report_console, summary_table
from paramserver.common.reporting.summary import Summary, WorkerStatus


def large(mode: str) -> Summary:
    worker = {"training_steps": 123_456, "contributions": 61_728, "samples": 12_345_678, "compute_s": 12_345.6,
              "transfer_s": 12_345.6, "wait_s": 12_345.6, "staleness_max": 64, "lead_max": 120, "bytes_sent": 10**12,
              "bytes_received": 10**12, "restarts": 3, "dropped": 12_345, "rejected": 12_345}  # fmt: skip
    workers = [WorkerStatus(rank=rank, **worker) for rank in range(3)]
    return Summary(mode=mode, wall_s=12_345.6, version=123_456, final={"accuracy": 0.5, "loss": 1.0}, workers=workers)


def lines(monkeypatch: pytest.MonkeyPatch, table: object, columns: str | None) -> list[str]:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    file = io.StringIO()
    report_console(file).print(table)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("table", [summary_table(large("sync")), comparison_table([(m, large(m)) for m in ("a", "b")])])
def test_at_80_columns_a_row_is_a_line_and_what_matters_most_stays(
    table: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide, narrow = lines(monkeypatch, table, None), lines(monkeypatch, table, "80")
    assert max(map(len, narrow)) <= 80
    assert set(" ".join(narrow).split()) < set(" ".join(wide).split()), "no word is broken, and some are left out"
    assert len(narrow) - len(wide) <= 1, "only the headline wraps"


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(20, 200))
def test_only_columns_that_may_go_go_and_only_for_lack_of_room(widths: list[int], width: int) -> None:
    names = [f"{at:x}" * size for at, size in enumerate(widths)]
    table = FittingTable(["run", *names], names[1:])
    table.add_row("row", *names)
    file = io.StringIO()
    console = report_console(file)
    console.width = width
    console.print(table)
    shown = file.getvalue().split()
    if sum(widths) + 2 * len(widths) + 3 <= min(width, 160):
        assert [word for word in shown if word in names] == [*names, *names]
