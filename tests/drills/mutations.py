"""Single mutations of a history: each field of each line changed, and each line deleted, repeated or moved.

`HARMLESS` lists, with the reason, what no reader of a history could miss. Everything else changes its meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from paramserver.tests.drills.histories import Line

_MEASURED = "a measurement, for people and ps-sim"
_FOR_SIM = "a connection that is lost or back, for ps-sim: the join that resumes is checked"
# (role, operation, field) whose value may be any: nothing else in the history depends on it.
HARMLESS = {
    ("*", "*", "t"): "the time of a line, for people and ps-sim",
    ("server", "accept", "compute_s"): _MEASURED,
    ("server", "accept", "transfer_s"): _MEASURED,
    ("server", "accept", "bytes"): _MEASURED,
    ("server", "accept", "num_steps"): "the server fills it in where the worker does not send it",
    ("server", "accept", "run_steps"): "announced by each process; the first word counts",
    ("worker", "send", "num_steps"): "compared by the server when it counts the contribution",
    ("server", "away", "*"): _FOR_SIM,
    ("server", "back", "*"): _FOR_SIM,
    ("server", "leave", "how"): "why it left; whether it had finished is in `finished`",
    ("server", "leave", "finished"): "says that all replies were sent, and they are in the history",
    ("server", "reply", "last"): "a promise about the future: a contribution after it is found",
    ("server", "reply", "weights"): "says that the base version stays; the next contribution shows it",
    ("server", "start", "source"): "where the snapshot is",
    ("server", "start", "skipped"): "damaged snapshots, with which a loss is explained",
    ("server", "start", "found"): "snapshots that are there, with which a loss is explained",
    ("server", "start", "common"): "settings of every mode, with which the run is not compared",
    ("server", "start", "options"): "a setting within its bounds: the run is compared with it, and may keep to both",
    ("server", "snapshot", "path"): "where the snapshot is",
    ("server", "snapshot", "sha256"): "compared with the file, which is not here",
    ("server", "control", "*"): "a request of a user, which may be any",
    ("server", "end", "over"): "says that all have left, which the lines show",
    ("server", "end", "begun"): "says that a server ended before its run",
}
# Lines that may be deleted or come twice.
MAY_LACK = {
    ("server", "snapshot"): "snapshots are made when it suits the server",
    ("server", "control"): "a request of a user",
    ("server", "away"): _FOR_SIM,
    ("server", "back"): _FOR_SIM,
}
MAY_REPEAT = MAY_LACK.keys() - {("server", "snapshot")}


class Mutation(NamedTuple):
    name: str  # what is done to which field of which operation
    line: int  # its position
    lines: list[Line]


def is_harmless(line: Line, field: str) -> bool:
    role, op = line["role"], line["op"]
    return bool({("*", "*", field), (role, op, field), (role, op, "*")} & HARMLESS.keys())


def mutations(lines: list[Line]) -> Iterator[Mutation]:
    """Every single mutation of a history that changes its meaning."""
    for at, line in enumerate(lines):
        name = f"{line['role']} {line['op']}"
        kind = line["role"], line["op"]
        if kind not in MAY_LACK and not _is_last_word(lines, at):
            yield Mutation(f"{name} deleted", at, lines[:at] + lines[at + 1 :])
        if kind not in MAY_REPEAT:
            yield Mutation(f"{name} repeated", at, lines[: at + 1] + lines[at:])
        if _is_order_told(lines, at):
            yield Mutation(f"{name} before its cause", at, [*lines[:at], lines[at + 1], line, *lines[at + 2 :]])
        for field, value in line.items():
            if field in ("role", "op") or is_harmless(line, field):
                continue
            for how, other in changes(field, value):
                changed = {**line, field: other}
                yield Mutation(f"{name}.{field} {how}", at, [*lines[:at], changed, *lines[at + 1 :]])


def changes(field: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Other values of a field, and what was done."""
    if isinstance(value, bool):
        yield "negated", not value
    elif isinstance(value, int):
        yield "+1", value + 1
        yield "+1000", value + 1000
        if value:
            yield "-1", value - 1
            yield "0", 0
    elif isinstance(value, str):
        yield "another", {"outcome": "REJECTED" if value != "REJECTED" else "DROPPED"}.get(field, value + "x")
        if field == "outcome" and value.islower():
            yield "of another kind", "dropped" if value != "dropped" else "accepted"
    elif isinstance(value, dict):
        for key in value:
            yield "one less", {name: item for name, item in value.items() if name != key}
            for how, other in changes("", value[key]):
                yield f"one {how}", {**value, key: other}
    elif isinstance(value, list) and field in ("contributions", "members"):
        for index, item in enumerate(value):
            yield "one less", value[:index] + value[index + 1 :]
            if isinstance(item, list):
                for part in range(3):
                    other = [number + (position == part) for position, number in enumerate(item)]
                    yield "one other", [*value[:index], other, *value[index + 1 :]]
        yield "one more", [*value, [9, 1, 1] if field == "contributions" else 9]


def _is_last_word(lines: list[Line], at: int) -> bool:
    """Whether a line is the last of a worker that did not end, or the server's last: the process may have died."""
    line = lines[at]
    mine = [other for other in lines[at + 1 :] if other["role"] == line["role"]]
    if line["role"] == "server":
        return not mine
    rest = [other for other in mine if other["rank"] == line["rank"]]
    if line["op"] == "end":  # it may have been killed before it wrote it
        return True
    # A lost reply and a worker that dies look alike.
    return not rest or (rest[0]["op"] == "start" and line["op"] in ("replied", "send", "start"))


def _is_order_told(lines: list[Line], at: int) -> bool:
    """Whether this line is the cause of the next one: of one server, of one rank or a commit."""
    if at + 1 == len(lines):
        return False
    line, after = lines[at], lines[at + 1]
    if (
        line["role"] != after["role"]
        or (line["role"], line["op"]) in MAY_LACK
        or after["op"] in ("control", "snapshot")
    ):
        return False
    if line["role"] == "worker":
        return line["rank"] == after["rank"]
    pair = line["op"], after["op"]
    if pair in (("accept", "commit"), ("commit", "reply"), ("commit", "accept"), ("reply", "commit")):
        ranks = {rank for rank, *_ in [*line.get("contributions", []), *after.get("contributions", [])]}
        return {line.get("rank"), after.get("rank")} - {None} <= ranks
    return line.get("rank", -1) == after.get("rank", -2)
