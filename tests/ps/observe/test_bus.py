"""The bus and what its sinks cannot do to a run; the history file on a full disk."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paramserver.common.reporting.history import History
from paramserver.common.reporting.summary import Status, WorkerStatus
from paramserver.ps.core.effects import Commit, Fact, RunEnded, Seated, SendReply, StatusTaken, WorkerLeft
from paramserver.ps.observe.bus import Bus, Sink
from paramserver.ps.observe.history import HistorySink
from paramserver.ps.observe.sinks import StatusSink

from ...records import reply_of


class Gathering(Sink):
    """Keeps what it is told. With I/O it may be held."""

    name = "gathering"

    def __init__(self) -> None:
        self.facts: list[Fact] = []
        self.events: list[str] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def take(self, at: float, fact: Fact) -> None:
        if self.does_io:
            self.events.append("take")
            self.may_go_on.wait(30)
        if isinstance(fact, WorkerLeft):
            raise ValueError("I do not like it")
        self.facts.append(fact)

    def close(self) -> None:
        self.events.append("close")


class Slow(Gathering):
    does_io = True


class Strict(Slow):
    needs_all = True


def committed(version: int) -> Commit:
    return Commit(version, (), ())


LEFT = WorkerLeft(0, 1, "closed", "connection lost")


def begun(sinks: list[Any], is_large: bool = False) -> Bus:
    bus = Bus(sinks)
    model: Any = SimpleNamespace(is_large=is_large)
    bus.begin(SimpleNamespace(model=model, run=None))  # type: ignore[arg-type]  # the sinks here see the model
    return bus


def logged(capsys: pytest.CaptureFixture[str]) -> str:
    output = capsys.readouterr()
    return output.out + output.err


@pytest.mark.parametrize("kind", [Gathering, Slow])
def test_a_sink_is_told_everything_in_order(kind: type[Gathering]) -> None:
    sink = kind()
    bus = begun([sink])
    facts = [committed(version) for version in range(5000)]
    for fact in facts:
        bus.publish(1.5, fact)
    bus.close()
    assert sink.facts == facts
    assert sink.events[-1] == "close"


@pytest.mark.parametrize("kind", [Gathering, Slow])
def test_a_sink_that_raises_is_switched_off_and_the_others_go_on(
    kind: type[Gathering], capsys: pytest.CaptureFixture[str]
) -> None:
    sink, other = kind(), Gathering()
    bus = begun([sink, other])
    bus.publish(0.0, committed(1))
    for _ in range(3):
        bus.publish(0.0, LEFT)
    bus.publish(0.0, committed(2))
    bus.close()
    assert sink.facts == [committed(1)]
    assert other.facts == [committed(1)]  # its own exception
    text = logged(capsys)
    assert text.count("sink_off") == 2  # one each
    assert "ValueError: I do not like it" in text


def test_a_slow_sink_loses_facts_and_the_run_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    for kind, expected in ((Slow, [0, 1, 2, 3, 4, 100]), (Strict, [0, 1, 2, 3, 4])):
        sink = kind()
        sink.may_go_on.clear()
        sink.capacity = 4  # type: ignore[misc]  # of this sink
        bus = begun([sink])
        bus.publish(0.0, committed(0))
        while not sink.events:  # it has the first in its hands
            pass
        for version in range(1, 50):
            bus.publish(0.0, committed(version))
        sink.may_go_on.set()
        while len(sink.facts) < 5:
            pass
        bus.publish(0.0, committed(100))
        bus.close()
        assert [fact.version for fact in sink.facts] == expected  # type: ignore[union-attr]
        text = logged(capsys)
        assert text.count("sink_slow") == 1
        assert f"dropped={51 - len(expected)}" in text


def test_closing_waits_for_a_sink_that_hangs_no_longer_than_it_is_told() -> None:
    class Impatient(Slow):
        close_s = 0.1

    sink = Impatient()
    sink.may_go_on.clear()
    bus = begun([sink])
    bus.publish(0.0, committed(1))
    bus.close()
    assert "close" not in sink.events
    sink.may_go_on.set()


# ---- the status ----------------------------------------------------------------------------------


def test_the_status_is_a_line_for_people_and_an_event_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    worker = WorkerStatus(rank=0, state="computing", step=12, loss=0.25)
    taken = Status(mode="ssp", version=24, elapsed_s=6.0, step=12, steps=50, workers=[worker])
    for is_json in (False, True):
        bus = begun([StatusSink(is_json)])
        bus.publish(0.0, StatusTaken(taken))
        bus.close()
    output = capsys.readouterr()
    assert output.err.splitlines()[0] == "step 12/50  version 24  training loss 0.250  19 s to go"
    assert "samples_per_s" in output.out + output.err  # of the event
    assert Status.parse(taken.fields()) == taken
    assert "versions" not in taken.fields()  # where there is one server process
    assert Status.parse({**taken.fields(), "workers": [{"rank": "none"}]}) is None


# ---- the history ---------------------------------------------------------------------------------


def test_the_history_has_a_line_for_each_fact(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    bus = begun([HistorySink(str(path))])
    bus.publish(1.25, Seated(5, 0, 1, False, 0))
    bus.publish(1.5, LEFT)
    bus.publish(1.75, SendReply(0, 1, reply_of(7, 9), True))
    bus.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"op": "join", "role": "server", "t": 1.25, "rank": 0, "incarnation": 1, "seq": 0, "resumed": False},
        {"op": "leave", "role": "server", "t": 1.5, "rank": 0, "incarnation": 1, "how": "closed"},
        {"op": "reply", "role": "server", "t": 1.75, "rank": 0, "incarnation": 1, "seq": 7, "version": 9,
         "outcome": "APPLIED", "training_steps": 0},
    ]  # fmt: skip


def test_a_reply_with_the_weights_of_a_large_model_may_have_newer_ones(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    bus = begun([HistorySink(str(path))], is_large=True)
    bus.publish(1.0, SendReply(0, 1, reply_of(7, 9), True))
    bus.publish(2.0, SendReply(0, 1, reply_of(8, 9), False))
    bus.close()
    assert ["newer" in json.loads(line) for line in path.read_text().splitlines()] == [True, False]


def test_a_full_disk_costs_the_history_and_not_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    bus = begun([HistorySink("/dev/full")])
    for version in range(100):
        bus.publish(0.0, committed(version))
    bus.publish(0.0, RunEnded(100, {}))
    bus.close()
    text = logged(capsys)
    assert text.count("sink_off") == 1
    assert "No space left on device" in text
    assert "dropped=101" in text


def test_a_full_disk_costs_a_worker_its_history_only(capsys: pytest.CaptureFixture[str]) -> None:
    history = History("/dev/full")
    for seq in range(10):
        history.write("send", rank=0, seq=seq)
    history.close()
    text = logged(capsys)
    assert text.count("history_off") == 1
    assert "missing=10" in text
