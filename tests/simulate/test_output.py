"""What ps-sim says while it simulates and at the end, and what is left when it is ended."""

from __future__ import annotations

import io
import re
import signal

from paramserver.common.reporting.pictures.progress import Steps
from paramserver.simulate.results.summary import for_people, sentence, summary
from paramserver.tests.cluster import Cluster
from paramserver.tests.simulate.worlds import simulated


def test_ctrl_c_shows_what_was_simulated(cluster: Cluster) -> None:
    flags = ("-n", "100", "--mb", "1", "--steps", "20000", "--bandwidth", "100mbit", "--mode", "async,sync")
    process = cluster.start("sim", "-c", "from paramserver.simulate.main import main; main()", *flags)
    process.until(lambda: "simulating async" in process.output, "its first hundredth")
    process.signal(signal.SIGINT)
    assert process.wait() == 130, process.output
    assert "Traceback" not in process.output
    assert "ended: 1 of 2 runs, the last run is incomplete" in process.output
    assert "Fastest is async, ended: " in process.output


def test_the_closing_sentence_and_the_columns() -> None:
    found = [(mode, summary(simulated(mode, 4, 20, jitter=0.5))) for mode in ("sync", "async")]
    text = sentence(found)
    assert re.fullmatch(
        r"Fastest is async: [\d.,]+ training steps a second of all workers, which compute \d+% of the time\. "
        r"Shares of that rate: sync \d+%\.", text,
    ), text  # fmt: skip
    assert sentence(found[:1]).endswith("% of the time.")
    assert set(dict(for_people(found))["sync"].final) == {"of ideal", "dropped"}
    assert "skew p50" in found[0][1].final, "--json has them all"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_time_that_is_left() -> None:
    clock, out = Clock(), io.StringIO()
    with Steps(out, clock) as steps:
        steps.at(0.0, "one")
        clock.now = 10.0
        steps.at(0.25, "one")  # without a terminal a line only where something else begins
        steps.at(0.5, "two")
        assert steps.left(0.01) == "", "too early to say"
    assert out.getvalue() == "one\ntwo, about 10 s to go\n"
    assert Steps(out, clock).left(0.5) == "", "nothing has passed yet"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar() -> None:
    clock, out = Clock(), Terminal()
    with Steps(out, clock) as steps:
        clock.now = 10.0
        steps.at(0.5, "measuring")
    assert "measuring" in out.getvalue() and "about 10 s to go" in out.getvalue() and "\n\n" not in out.getvalue()
