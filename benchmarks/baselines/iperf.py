"""iperf3: what one TCP stream over loopback carries, each way."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...common.errors import ParamServerError
from ..rig.turns import Measured, Samples
from .base import Baseline

# A stream needs this much to get going; what it carries in a second is then taken for any size.
_LEAST_BYTES = 200_000_000
_START_S, _RUN_S = 10.0, 120.0


class Iperf(Baseline):
    name = "iperf"
    programs = ("iperf3",)
    install = "apt-get install iperf3"

    @contextmanager
    def exchange(self, num_floats: int) -> Iterator[Measured]:
        """Parts up and down: seconds that the tensor's bytes take at the rate of the stream."""
        num_bytes = num_floats * 4
        with _server() as port:

            def measured(count: int) -> Samples:
                return {
                    "up": [num_bytes / _bytes_per_s(port, num_bytes) for _ in range(count)],
                    "down": [num_bytes / _bytes_per_s(port, num_bytes, "--reverse") for _ in range(count)],
                }

            yield measured


@contextmanager
def _server() -> Iterator[int]:
    """`iperf3 -s` on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["iperf3", "--server", "--bind", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_it_listens(port)
        yield port
    finally:
        process.terminate()
        process.wait()


def _wait_until_it_listens(port: int) -> None:
    """Wait until the system shows the port as listening; a test connection would count as a client."""
    deadline = time.monotonic() + _START_S
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return
        if time.monotonic() > deadline:
            raise ParamServerError(f"iperf3 did not listen within {_START_S:g} s")
        time.sleep(0.05)


def _bytes_per_s(port: int, num_bytes: int, *flags: str) -> float:
    size = str(max(num_bytes, _LEAST_BYTES))
    command = ["iperf3", "--client", "127.0.0.1", "--port", str(port), "--bytes", size, "--json", *flags]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_RUN_S)
    found: dict[str, Any] = json.loads(done.stdout or "{}")
    if done.returncode != 0 or "end" not in found:
        raise ParamServerError(f"iperf3 failed: {found.get('error') or done.stderr or done.returncode}")
    return float(found["end"]["sum_received"]["bits_per_second"]) / 8


ENTRY = Iperf
