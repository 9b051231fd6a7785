"""Events go to standard error, a line each, also where several processes write to one file."""

from __future__ import annotations

import json
import os
import subprocess
import sys

PROGRAM = """
from common.config.schema import LogConfig
from common.reporting.log import get_logger, setup_logging
setup_logging(LogConfig(format="json"), "ps-worker")
get_logger().info("place", rank=1)
"""


def test_a_line_and_its_end_are_one_write() -> None:
    """torchrun's workers share one file: two writes let another's line come between (PYTHONUNBUFFERED)."""
    reading, writing = os.pipe2(os.O_DIRECT)  # a packet for each write
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    subprocess.run([sys.executable, "-c", PROGRAM], stderr=writing, env=env, check=True)
    os.close(writing)
    packet = os.read(reading, 65536)
    assert packet.endswith(b"}\n"), packet
    assert json.loads(packet)["event"] == "place"
    assert os.read(reading, 65536) == b""
    os.close(reading)
