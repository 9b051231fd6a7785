"""ps-server at a terminal of 80 columns: a table that stays, log lines above it, and nothing of it at the end."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import threading

import pytest

from paramserver.tests.cluster import Cluster, Process, end_well

_CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class AtATerminal(Process):
    """As a process, whose output comes from a terminal of its own."""

    def __init__(self, argv: list[str], env: dict[str, str], cluster: Cluster) -> None:
        self.name, self.data = "at a terminal", b""
        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.popen = subprocess.Popen(
            argv, stdin=slave, stdout=slave, stderr=slave, env=env, cwd=cluster.folder, start_new_session=True
        )
        os.close(slave)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        cluster.processes.append(self)

    def _read(self) -> None:
        try:
            while data := os.read(self.master, 65536):
                self.data += data
        except OSError:  # EIO: nobody has the other side any more
            pass

    @property
    def output(self) -> str:
        return self.data.decode("utf-8", "replace")

    @property
    def plain(self) -> str:
        """Every line as it was drawn, one after another: what wipes a line begins another."""
        return _CODES.sub("", re.sub(r"\x1b\[\d*[AK]", "\n", self.output)).replace("\r", "")


@pytest.mark.slow
@pytest.mark.parametrize(("term", "is_live"), [("xterm", True), ("dumb", False)])
def test_the_live_table(cluster: Cluster, term: str, is_live: bool) -> None:
    env = {**os.environ, "TERM": term, "PS_SERVER__ABSENT_S": "0", "OMP_NUM_THREADS": "1", "PS_LOG__FORMAT": "text"}
    flags = ("--listen", "127.0.0.1:0", "--workers", "2", "--steps", "40", "--set", "server.status_interval_s=0.1")
    server = AtATerminal([sys.executable, "-m", "paramserver.ps", *flags], env, cluster)
    server.until(lambda: "address=127.0.0.1:" in server.plain, "address")
    server.until(lambda: not is_live or "waiting: a worker to join" in server.plain, "word on who is missing")
    cluster.address = re.search(r"address=(127\.0\.0\.1:\d+)", server.plain)[1]
    slow = ("--task", "xor", "--set", "slowdown.base_s=0.02")
    workers = [cluster.worker(rank, *slow) for rank in range(2)]
    end_well(*workers, server)
    server.reader.join(10)
    assert ("worker state" in server.plain.replace("  ", " ")) is is_live
    for word in ("model", "training_started", "40 updates in"):  # the log, and the summary after it
        assert word in server.plain
    for word in ("admitted", "finished rank", "left"):  # of a worker's normal life
        assert word not in server.plain
    assert "\x1b[?25l" not in server.output  # the cursor stays, whatever kills the server
    if is_live:
        rows = [line.split() for line in server.plain.splitlines() if re.match(r" +[01] +computing ", line)]
        drawn = server.plain[server.plain.index("waiting: a worker to join") :]  # the terminal wraps what came before
        assert [line for line in drawn.splitlines() if len(line.rstrip()) > 80] == []
        assert {row[0] for row in rows} == {"0", "1"} and any(row[2].endswith("/40") for row in rows)
        last = server.output.rindex("waits for") if "waits for" in server.output else server.output.rindex("computing")
        assert "\x1b[1A" in server.output[last:], "the table is wiped at the end"
