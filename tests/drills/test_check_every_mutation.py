"""ps-launch check: single mutations are found, real and simulated histories are accepted, and damaged lines end in one
sentence."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paramserver.common.registry import MODES
from paramserver.drills.check import check
from paramserver.tests.combinations.run import run
from paramserver.tests.drills.histories import (
    Line,
    applied,
    encoded,
    joined,
    messages,
    options_of,
    rows_of,
    start,
    verdict_of,
)
from paramserver.tests.drills.mutations import mutations
from paramserver.tests.drills.simulation import ALL_MODES, simulate
from paramserver.tests.simulate.histories import recorded

CONFIG = Path(__file__).parents[2] / "configs" / "linear.yaml"
WANTED = 0.99
SIMULATED = [mode for mode in MODES.names() if not MODES.load(mode).kind.has_peers]


def found(lines: list[Line], most: int, seed: int = 0) -> tuple[float, list[str]]:
    """The share of so many mutations that are found, and those that are not."""
    every = list(mutations(lines))
    chosen = random.Random(seed).sample(every, min(most, len(every)))
    missed = [f"line {it.line + 1}: {it.name}" for it in chosen if is_accepted(it.lines)]
    return 1 - len(missed) / len(chosen), missed


def is_accepted(lines: list[Line]) -> bool:
    verdict = verdict_of(lines)
    return verdict.is_good and not verdict.deleted and verdict.last_op == "end"


def run_of(folder: Path, mode: str, *flags: str) -> list[Line]:
    """The history of a real run with its workers' lines."""
    code = "from paramserver.launch.main import main; main()"
    history = folder / f"{mode}.jsonl"
    command = [sys.executable, "-c", code, str(CONFIG), "-n", "2", "--mode", mode, "--history", str(history), *flags]
    command += ["--set", "log.level=error", "--set", "output.store=false"]
    subprocess.run(command, check=True, capture_output=True, timeout=300, cwd=folder)
    return [json.loads(line) for line in history.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ALL_MODES)
def test_mutations_of_a_real_history_of_each_mode_are_found(mode: str, tmp_path: Path) -> None:
    has_local_steps = "local_steps" in options_of(mode)
    flags = ["--set", "policy.local_steps=4"] if has_local_steps else []
    lines = run_of(tmp_path, mode, "--steps", "24", "--checkpoint-dir", "snapshots", *flags)
    assert verdict_of(lines).problems == []
    share, missed = found(lines, 4000)
    assert share >= WANTED, missed


@pytest.mark.slow
def test_weights_of_an_older_version_are_accepted(tmp_path: Path) -> None:
    """Of async, as a codec of differences sends them. The row is well only if its history is."""
    row = run({"mode": "async", "workers": "2", "reply_codec": "q4"}, tmp_path / "run")
    assert row.is_well, (row.problems, row.output[-2000:])
    assert '"reference":' in (tmp_path / "run" / "history.jsonl").read_text()


@pytest.mark.parametrize("mode", ALL_MODES)
def test_mutations_of_simulated_histories_are_found(mode: str) -> None:
    missed, num = [], 0
    for seed in range(6):
        chance = random.Random(seed)
        every = list(mutations(simulate(mode, chance)))
        for mutation in chance.sample(every, min(30, len(every))):
            num += 1
            if verdict_of(mutation.lines).is_good:
                missed.append(f"line {mutation.line + 1}: {mutation.name}")
    assert 1 - len(missed) / num >= 0.95, missed  # the rest a server did not write before it was killed


@pytest.mark.parametrize("mode", SIMULATED)
def test_simulated_histories_with_faults_are_accepted(mode: str) -> None:
    for seed in range(3):
        settings: dict[str, Any] = {"jitter": 0.4, "mtbf_s": 20.0, "back_s": 2.0, "latency_s": 0.02, "seed": seed}
        lines = recorded(mode, 4, 20, **settings)
        assert messages([line.fields for line in lines]) == ""


# ---- the forged histories of a review: not single mutations ---------------------------------------


def whole_run() -> list[Line]:
    """Two workers of an async run, by turns, with their lines."""
    lines = [start("async"), *joined(0, 1)]
    begun = {"role": "worker", "incarnation": 1}
    lines += [{"op": "start", **begun, "run": "r", "rank": rank, "server_incarnation": 1, "seq": 0, "version": 0}
              for rank in (0, 1)]  # fmt: skip
    bases = [0, 0]
    for version in range(1, 9):
        rank, seq = version % 2, (version + 1) // 2
        sent = {"rank": rank, "seq": seq, "base_version": bases[rank], "num_steps": 1, "num_batches": 1}
        accept, commit, reply = applied(rank, seq, version, 0, 1)
        accept["base_version"], reply["training_steps"] = bases[rank], seq
        lines += [{"op": "send", **begun, **sent}, accept, commit, reply]
        lines.append({"op": "replied", **begun, "rank": rank, "seq": seq, "version": version, "outcome": "APPLIED"})
        bases[rank] = version
    for rank in (0, 1):
        lines.append({"op": "end", "role": "worker", "rank": rank, "seq": 4})
        left = {"op": "leave", "role": "server", "rank": rank, "incarnation": 1, "how": "goodbye", "finished": True}
        lines.append(left)
    return [*lines, {"op": "end", "role": "server", "version": 8, "rows": rows_of({"0": 4, "1": 4}), "over": True}]


def of_server(lines: list[Line], op: str) -> list[Line]:
    return [line for line in lines if line["role"] == "server" and line["op"] == op]


def every_base_is_the_newest(lines: list[Line]) -> list[Line]:
    return [{**line, "base_version": line["version"]} if line["op"] == "accept" else line for line in lines]


def every_accept_is_later(lines: list[Line]) -> list[Line]:
    return [{**line, "version": line["version"] + 1000} if line["op"] == "accept" else line for line in lines]


def last_replies_are_missing(lines: list[Line]) -> list[Line]:
    last = of_server(lines, "reply")[-2:]
    return [line for line in lines if line not in last]


def versions_never_were(lines: list[Line]) -> list[Line]:
    return [{**line, "version": line["version"] + 500} if line["op"] == "replied" else line for line in lines]


def nobody_leaves(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line["op"] != "leave"]


def nobody_receives(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line["op"] != "replied"]


def a_version_of_nothing(lines: list[Line]) -> list[Line]:
    commit = {**of_server(lines, "commit")[-1], "version": 9, "contributions": []}
    return [*lines[:-1], commit, {**lines[-1], "version": 9}]


FORGED = [
    every_base_is_the_newest, every_accept_is_later, last_replies_are_missing, versions_never_were, nobody_leaves,
    nobody_receives, a_version_of_nothing,
]  # fmt: skip


@pytest.mark.parametrize("forge", FORGED, ids=lambda forge: forge.__name__)
@pytest.mark.parametrize("has_workers", [True, False])
def test_forged_histories_are_refused(forge: Any, has_workers: bool) -> None:
    lines = whole_run()
    assert messages(lines) == ""
    forged = forge(lines)
    if not has_workers:
        forged = [line for line in forged if line["role"] == "server"]
        if forged == [line for line in lines if line["role"] == "server"]:
            return
    assert messages(forged) != ""


# ---- damaged lines ----------------------------------------------------------------------------------

VALUES = ["²", "٣", "x", "", -1, 1.5, 10**12, 2**63, 10**400, None, True, [], {}, [[]], {"²": 1}, {"0": "x"},
          {"0": 10**12}, float("nan"), float("inf")]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_field_of_any_other_value_ends_in_sentences_with_line_numbers(value: Any) -> None:
    lines = whole_run()
    lines[0] |= {"found": [], "skipped": []}
    chosen = [lines[0], *({line["op"] + line["role"]: line for line in lines}.values())]
    control = {"op": "control", "role": "server", "do": "set", "name": "late_cut", "value": 3, "done": True}
    lines.insert(3, control)
    for line in [*chosen, control]:
        at = lines.index(line)
        for field in line:
            damaged = [*lines[:at], {**line, field: value}, *lines[at + 1 :]]
            for problem in verdict_of(damaged).problems:
                assert problem.number > 0 and len(problem.message) < 600 and "\n" not in problem.message


@pytest.mark.parametrize(
    "raw",
    [
        b'{"op":"accept","role":"server","rank":"\xc2\xb2"}\n', b'{"op":"acce\n', b"[" * 100_000 + b"\n", b"\xff\xfe\n",
        b'{"a":' * 5000 + b"\n", b'{"op":"join","role":"server","rank":' + b"9" * 10_000 + b"}\n",
        b"null\n", b"\0" * 99 + b"\n",
        b'{"op":"commit","role":"server","version":NaN,"contributions":[],"members":[]}\n',
    ],
    ids=range(9),
)  # fmt: skip
def test_a_line_that_is_none_is_named_by_its_number(raw: bytes) -> None:
    lines = encoded(*whole_run())
    problems = check({"h": [*lines[:4], raw, *lines[4:]]}).problems
    assert [problem.number for problem in problems] == [5]


def test_numbers_beyond_any_history_take_neither_memory_nor_time() -> None:
    lines = [line for line in whole_run() if line["op"] != "end"]
    again = start("async", incarnation=2, version=10**12, seqs={"0": 10**12, "1": 4})
    assert "contributions that no line has" in messages([*lines, again])


def test_a_mode_without_its_options_is_one_sentence() -> None:
    for mode in ALL_MODES:
        first = start(mode)
        if len(first["options"]) > 0:
            first["options"].popitem()
            assert messages([first]).count("\n") == 0 and "h:1: mode" in messages([first])
        assert "cannot have these options" in messages([{**first, "options": {"unheard_of": 1}}])


def test_a_file_without_line_ends_is_not_read_as_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paramserver.drills import history_lines
    from paramserver.drills.check_main import check_paths

    monkeypatch.setattr(history_lines, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "h.jsonl"
    path.write_bytes(b"".join(encoded(start("async"), *joined(0))) + json.dumps("x" * 5000).encode())
    (problem,) = check_paths([str(path)], []).problems
    assert problem.number == 5 and "a line of more than 1,000 bytes" in problem.message
