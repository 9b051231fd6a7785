"""Rounds a second of several workers with 1, 2 and 4 shards, every process on a host of its own.

    make shards                                          1 Gbit/s per host, 4 workers, sync
    python tests/shards/measure.py --mode async --rate 500mbit --workers 2 --shards 1,2

The hosts are network namespaces whose links have a rate in each direction. Workers compute next to nothing
(task ledger), so a step is its exchange. The ledger also proves that nothing was lost or applied twice.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hosts import Host, HostsError, hosts

_START_S = 120.0
_RUN_S = 600.0
_EXIT_SKIPPED = 77  # as automake's tests say it


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--rate", default="1gbit", help="of each host, in each direction, as tc writes it")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--shards", default="1,2,4", help="numbers of shards, compared with the first")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--mb", type=int, default=32, help="size of the model")
    parser.add_argument("--repeats", type=int, default=3, help="of each, in turns")
    parser.add_argument("--json", action="store_true", help="metrics as one JSON object")
    return parser.parse_args()


def run_once(asked: argparse.Namespace, servers: list[Host], workers: list[Host], folder: Path) -> dict[str, Any]:
    """One run; its summary."""
    samples = asked.steps * len(workers) * 8
    told = [
        f"run.mode={asked.mode}", f"run.workers={len(workers)}", f"run.steps={asked.steps}", "run.batch_size=8",
        "task.name=ledger", f"task.args={{samples: {samples}, padding_bytes: {asked.mb * 1_000_000}}}",
        "optimizer.lr=1", "policy.weighting=equal", "server.insecure=true", "worker.transports=direct,grpc",
        "worker.give_up_s=120",
    ]  # fmt: skip
    flags = [word for setting in told for word in ("--set", setting)]
    processes: list[tuple[subprocess.Popen[bytes], Path]] = []

    def start(host: Host, name: str, *argv: str) -> tuple[subprocess.Popen[bytes], Path]:
        env = {**os.environ, "PS_LOG__FORMAT": "json", "OMP_NUM_THREADS": "1"}
        log = folder / f"{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*host.prefix, sys.executable, "-m", *argv, *flags], stdout=file, stderr=file, env=env, cwd=folder
            )
        processes.append((process, log))
        return process, log

    count = ("--shards", str(len(servers)))
    try:
        listen = f"{servers[0].address}:0"
        server, log = start(servers[0], "shard0", "paramserver.ps", *count, "--listen", listen, "--summary", "s.json")
        address = _address(server, log)
        for number, host in enumerate(servers[1:], 1):
            where = ("--shard", str(number), "--coordinator", address, "--listen", f"{host.address}:0")
            start(host, f"shard{number}", "paramserver.ps", *count, *where)
        for rank, host in enumerate(workers):
            start(host, f"worker{rank}", "paramserver.worker", "--rank", str(rank), "--server", address)
        for process, log in processes:
            if process.wait(timeout=_RUN_S):
                raise RuntimeError(f"{log.name}:\n{log.read_text()[-3000:]}")
    finally:
        for process, _ in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return dict(json.loads((folder / "s.json").read_text()))


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    """Where the server listens, once it does."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and server.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("{") and line.endswith("}") and json.loads(line)["event"] == "listening":
                return str(json.loads(line)["address"])
        time.sleep(0.05)
    raise RuntimeError(f"the server does not listen:\n{log.read_text()}")


def measure(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """For each number of shards the median of updates a second, and what each shard held."""
    numbers = [int(text) for text in asked.shards.split(",")]
    found: dict[int, list[dict[str, Any]]] = {number: [] for number in numbers}
    with hosts(max(numbers) + asked.workers, asked.rate) as machines:
        workers = machines[max(numbers) :]
        for _ in range(asked.repeats):
            for number in numbers:
                with tempfile.TemporaryDirectory() as folder:
                    found[number].append(run_once(asked, machines[:number], workers, Path(folder)))
    rows = []
    for number, summaries in found.items():
        rates = [asked.steps / summary["wall_s"] for summary in summaries]
        final = summaries[-1]["final"]
        rows.append({
            "shards": number,
            "rounds_per_s": round(statistics.median(rates), 3),
            "all": [round(rate, 3) for rate in rates],
            "held_mb": [round(sum(shard["bytes"].values()) / 1e6, 1) for shard in summaries[-1]["shards"]],
            "missing": final.get("missing"),
            "repeated": final.get("repeated"),
        })  # fmt: skip
    for row in rows:
        row["speedup"] = round(row["rounds_per_s"] / rows[0]["rounds_per_s"], 2)
    return rows


def main() -> None:
    asked = arguments()
    # Ended from outside, the namespaces still have to go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        rows = measure(asked)
    except HostsError as error:
        print(f"SKIPPED: {error}", file=sys.stderr)
        sys.exit(_EXIT_SKIPPED)
    if asked.json:
        print(json.dumps(rows))
        return
    print(f"{asked.mode}, {asked.mb} MB, {asked.workers} workers, {asked.rate} per host:")
    for row in rows:
        print(
            f"  {row['shards']} shards: {row['rounds_per_s']:.2f} steps/s {row['all']}, {row['speedup']:.2f} x; {row}"
        )


if __name__ == "__main__":
    main()
