"""Events go to standard error, a line each, also where several processes write to one file."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# argv: FORMAT LEVEL
SET_UP = """
import sys
from paramserver.common.config.schema import LogConfig
from paramserver.common.reporting.log import get_logger, setup_logging
setup_logging(LogConfig(format=sys.argv[1], level=sys.argv[2]), "ps-worker")
"""
PLACE = 'get_logger().info("place", rank=1)'
HOSTILE = """
get_logger().info("left", reason="gone\\n12:00:00 [error] run_failed", host="\\x1b[2J\\x9b1m\\u202e", rank=1)
try:
    raise ValueError("two\\nlines")
except ValueError:
    get_logger().error("failed", exc_info=True)
"""
ROUTINE = """
get_logger().routine("tensors", transport="direct")
get_logger().info("model", parameters=8)
"""


def command(program: str, form: str, level: str = "info") -> list[str]:
    return [sys.executable, "-c", SET_UP + program, form, level]


def test_a_line_and_its_end_are_one_write() -> None:
    """torchrun's workers share one file: two writes let another's line come between (PYTHONUNBUFFERED)."""
    reading, writing = os.pipe2(os.O_DIRECT)  # a packet for each write
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    subprocess.run(command(PLACE, "json"), stderr=writing, env=env, check=True)
    os.close(writing)
    packet = os.read(reading, 65536)
    assert packet.endswith(b"}\n"), packet
    assert json.loads(packet)["event"] == "place"
    assert os.read(reading, 65536) == b""
    os.close(reading)


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_comes_from_elsewhere_begins_no_line_and_moves_no_cursor(form: str) -> None:
    """A line break, a terminal's escapes, and what turns the direction of writing."""
    done = subprocess.run(command(HOSTILE, form), capture_output=True, text=True, check=True)
    first, *rest = done.stderr.splitlines()
    shown = json.loads(first)["reason"] if form == "json" else first
    assert "gone\\\\n12:00:00" in shown or "gone\\n12:00:00" in shown
    assert all(item.isprintable() for item in (first, shown))
    assert not first.isascii() or "\\x1b" in first
    traceback = json.loads(rest[0])["exception"] if form == "json" else "\n".join(rest)
    assert "two\nlines" in traceback, "a traceback has lines"


@pytest.mark.parametrize(
    ("form", "level", "events"),
    [("text", "info", ["model"]), ("text", "debug", ["tensors", "model"]), ("json", "info", ["tensors", "model"]),
     ("json", "warning", []), ("text", "warning", [])],
)  # fmt: skip
def test_a_workers_normal_life_is_told_to_programs_only(form: str, level: str, events: list[str]) -> None:
    done = subprocess.run(command(ROUTINE, form, level), capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert [name for line in lines for name in ("tensors", "model") if name in line] == events
    if form == "json" and lines:
        assert [json.loads(line)["level"] for line in lines] == ["debug", "info"]
        assert "_routine" not in json.loads(lines[0])
