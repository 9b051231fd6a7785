"""ps-launch check: files cut short or of another form, and the command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from paramserver.drills.check import check
from paramserver.drills.check_main import show
from paramserver.tests.drills.histories import Line, applied, encoded, joined, messages, start


def test_half_a_line_is_allowed_where_a_process_died() -> None:
    first = [start("async"), *joined(0)]
    beginning = b'{"op":"accept","role":"ser'
    assert check({"h": [*encoded(*first), beginning]}).is_good
    again = json.dumps(start("async", incarnation=2)).encode() + b"\n"
    assert check({"h": [*encoded(*first), beginning + again]}).is_good
    later = check({"h": [*encoded(*first), beginning + encoded(*applied(0, 1, 1, 0))[0]]})
    assert [str(problem) for problem in later.problems] == [
        "h:5: a partial line is followed by accept: only a start may follow a partial line"
    ]
    shared = {"op": "start", "role": "worker", "run": "r", "rank": 0, "incarnation": 1, "server_incarnation": 1}
    shared |= {"seq": 0, "version": 0}
    assert check({"h": [*encoded(*first), beginning + encoded(shared)[0]]}).is_good
    middle = check({"h": [*encoded(*first), beginning + b"\n", *encoded(*applied(0, 1, 1, 0))]})
    assert [str(problem) for problem in middle.problems] == ["h:5: not a JSON object"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"op": "jump", "role": "server"}, "operation 'jump' of role 'server'"),
        ({"op": "join", "role": "cook"}, "operation 'join' of role 'cook'"),
        ({"op": "leave", "role": "server", "rank": 0, "incarnation": 1}, "leave without 'how'"),
        ({"op": "end", "role": "server", "version": -1, "rows": {}}, "it must be a whole number"),
        ({"op": "end", "role": "server", "version": 1, "rows": {"a": [1, 1, 1, 1, 0]}}, "it must be {rank: [seq,"),
    ],
)
def test_a_line_of_another_form_is_named(line: Line, message: str) -> None:
    assert message in messages([start("async"), line])


def test_without_a_servers_history_nothing_can_be_said() -> None:
    lines = [{"op": "end", "role": "worker", "rank": 0, "seq": 1}]
    assert "no file has lines of a server" in messages(lines)
    assert "no file has lines of a server" in "\n".join(map(str, check({}).problems))


def test_the_command(tmp_path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    lines = [start("async"), *joined(0), *applied(0, 1, 1, 0)]
    good.write_bytes(b"".join(encoded(*lines)))
    bad.write_bytes(b"".join(encoded(*lines, *applied(0, 1, 2, 0))))

    def run(*files: object) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "paramserver.launch", "check", *map(str, files)]
        return subprocess.run(argv, capture_output=True, text=True, check=False)

    kept, broken, missing = run(good), run(bad), run(tmp_path / "none")
    assert (kept.returncode, broken.returncode, missing.returncode) == (0, 1, 2)
    assert "every contribution was applied once" in kept.stdout
    assert f"{bad}:9: contribution 1 of rank 0 is committed again: it was on line 6" in broken.stdout
    assert "cannot be read" in missing.stderr


def test_a_history_without_the_runs_end_is_said_to_be_cut(capsys: pytest.CaptureFixture[str]) -> None:
    whole = [start("async"), *joined(0), *applied(0, 1, 1, 0)]
    end = {"op": "end", "role": "server", "version": 1, "rows": {"0": [1, 1, 1, 1, 0]}}
    for lines, is_cut in (([*whole, end], False), (whole, True), ([*whole[:-1]], True)):
        verdict = check({"h": encoded(*lines)})
        show(verdict)
        assert ("the history is cut: its last line is" in capsys.readouterr().out) is is_cut
        assert verdict.is_good
