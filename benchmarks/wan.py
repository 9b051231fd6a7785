"""Emulates a link between cities, and measures transports on it beside iperf3.

    sudo python -m paramserver.benchmarks.wan [--rate 100] [--delays 10,50,100] [--losses 0,0.1,1] [--mb 16] [--turns 5]

Two network namespaces of this machine are joined by two tun devices and a process between them that has a rate, a queue
of twice what is on its way, half a round trip of delay each way, and loses packets. Over it: iperf3 one way (TCP, 8 s),
then one worker's exchanges of a model of so many MB in every transport: contribution up, weights down. Printed is a
payload's Mbit over the seconds of an exchange, the median of the turns, and what part of iperf3's that is: 1 is both
ways full at once, 0.5 one after the other. Needs root, `ip` and `iperf3`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from .rig.relay import Way, relay, tun

HOST, PEER, PORT = "10.213.78.1", "10.213.78.2", 5299
SCRIPT = """
import sys, time, torch, paramserver
torch.set_num_threads(1)
model = torch.nn.Linear(1000, int(sys.argv[1]) * 250, bias=False)
model.weight.grad = torch.zeros_like(model.weight)
with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
    while not session.is_done:
        began = time.perf_counter()
        optimizer.step()
        print("TOOK", time.perf_counter() - began, flush=True)
    session.finish()
"""


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True)


@contextlib.contextmanager
def link(rate: float, delay_ms: float, loss: float) -> Iterator[tuple[list[str], list[str]]]:
    """The prefixes that run a program at either end. `rate` in Mbit/s, `delay_ms` of a round trip, `loss` in %."""
    names = [f"wan{os.getpid()}{end}" for end in "ab"]
    ends = [tun(name) for name in names]
    between = multiprocessing.get_context("fork").Process(
        target=relay, args=([Way(item, other, rate, delay_ms / 2e3, loss) for item, other in (ends, ends[::-1])],)
    )
    try:
        for name, here, there in zip(names, (HOST, PEER), (PEER, HOST), strict=True):
            _run("ip", "netns", "add", name)
            _run("ip", "link", "set", name, "netns", name)
            _run("ip", "-n", name, "address", "add", here, "peer", there, "dev", name)
            for each in ("lo", name):
                _run("ip", "-n", name, "link", "set", each, "up")
        between.start()
        yield ["ip", "netns", "exec", names[0]], ["ip", "netns", "exec", names[1]]
    finally:
        if between.pid is not None:
            between.kill()
            between.join()
        for name, end in zip(names, ends, strict=True):
            subprocess.run(("ip", "netns", "delete", name), stderr=subprocess.DEVNULL, check=False)
            os.close(end)


def iperf(near: list[str], far: list[str]) -> float:
    """Returns Mbit/s one way."""
    server = subprocess.Popen(
        [*near, "iperf3", "-s", "-1", "--forceflush", "-p", str(PORT)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            pass
        client = [*far, "iperf3", "-c", HOST, "-p", str(PORT), "-t", "8", "-O", "2", "-J"]
        result = json.loads(subprocess.run(client, capture_output=True, text=True, check=True).stdout)
        return float(result["end"]["sum_received"]["bits_per_second"]) / 1e6
    finally:
        server.kill()
        server.wait()


def exchange(near: list[str], far: list[str], transport: str, asked: argparse.Namespace) -> list[float]:
    """Returns the seconds of each exchange after the first two."""
    with tempfile.TemporaryDirectory(prefix="wan-") as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        steps = str(asked.turns + 2)
        argv = ["--mode", "sync", "--workers", "1", "--steps", steps, "--listen", f"{HOST}:0"]
        argv += ["--set", "server.insecure=true"]
        server = subprocess.Popen(
            [*near, sys.executable, "-m", "paramserver.ps", *argv],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            assert server.stdout is not None
            seen = ""
            while not (found := re.search(r"listening.*?address=(\S+)", seen)):
                if not (line := server.stdout.readline()):
                    raise SystemExit(seen)
                seen += line
            env = {
                **os.environ,
                "PS_WORKER__SERVER": found[1],
                "PS_WORKER__TRANSPORTS": ",".join(dict.fromkeys((transport, "grpc"))),
            }
            worker = [*far, sys.executable, str(script), str(asked.mb)]
            result = subprocess.run(worker, env=env, capture_output=True, text=True, timeout=900, check=False)
            took = [float(item) for item in re.findall(r"TOOK (\S+)", result.stdout)]
            if result.returncode or len(took) < asked.turns + 2:
                raise SystemExit(result.stdout + result.stderr)
            if broke := (result.stdout + result.stderr).count("connection_lost"):
                print(f"        {transport}: {broke} connections lost", flush=True)
            return took[2:]
        finally:
            server.kill()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=100, help="Mbit/s")
    parser.add_argument("--delays", default="10,50,100", help="ms, of a round trip")
    parser.add_argument("--losses", default="0,0.1,1", help="%% of packets, each way")
    parser.add_argument("--transports", default="grpc,direct")
    parser.add_argument("--mb", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root: run it with sudo")
    for delay in asked.delays.split(","):
        for loss in asked.losses.split(","):
            with link(asked.rate, float(delay), float(loss)) as (near, far):
                most = iperf(near, far)
                print(f"{asked.rate:g} Mbit/s, {delay} ms, {loss} % lost: iperf3 {most:.1f} Mbit/s", flush=True)
                for transport in asked.transports.split(","):
                    seconds = exchange(near, far, transport, asked)
                    mbit = asked.mb * 8 / median(seconds)
                    spread = f"{min(seconds):.2f} to {max(seconds):.2f} s"
                    print(f"    {transport:<7}{mbit:8.1f} Mbit/s, {mbit / most:.2f} of it   ({spread})", flush=True)


if __name__ == "__main__":
    main()
