"""Seconds a step over a slow link, without and with something that overlaps exchange and computation.

    make overlap                                                 policy.delayed_update, in every mode that can
    python tests/overlap/measure.py --mode ssp --rate 1gbit --set run.batch_size=64
    python tests/overlap/measure.py --mode sync --deep --workers 1     gradients and weights that travel meanwhile

The server is at one end of the link, all workers at the other. Computing is mostly a pause
(slowdown.base_s), so that neither the number of cores nor other programs decide the metrics; with --deep it is
a forward and a backward pass through nine layers, and both directions overlap with it or neither (worker.overlap).
Variants take turns; shown is the median of the summaries' wall_s by steps.
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

from slow_link import Link, LinkError, slow_link

_START_S = 60.0
_EXIT_SKIPPED = 77  # as automake's tests say it


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", action="append", help="repeatable; default async, ssp and localsgd")
    parser.add_argument("--rate", default="400mbit", help="of the link, in each direction, as tc writes it")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24, help="training steps per worker")
    parser.add_argument("--hidden", type=int, default=4096, help="size of the model: 1 KiB for each")
    parser.add_argument(
        "--compute-s", type=float, default=0.17, help="pause that stands for a contribution's computing"
    )
    parser.add_argument("--deep", action="store_true", help="real computing: worker.overlap=true beside false")
    parser.add_argument("--samples", type=int, default=2000, help="--deep: of a batch; 2000 take about 0.1 s")
    parser.add_argument("--local-steps", type=int, default=4, help="localsgd: steps that share --compute-s")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="in both variants")
    parser.add_argument("--plain", action="append", default=[], metavar="KEY=VALUE", help="in the first only")
    parser.add_argument("--changed", action="append", default=[], metavar="KEY=VALUE",
                        help="in the second only; default policy.delayed_update=true, or "
                             "worker.overlap=true")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="metrics as one JSON object")
    return parser.parse_args()


def settings(asked: argparse.Namespace, mode: str, extra: list[str]) -> list[str]:
    """What every process of a run is told. Shared memory would go round the link."""
    local_steps = asked.local_steps if mode == "localsgd" else 1
    told = [
        f"run.mode={mode}", f"run.workers={asked.workers}", f"run.steps={asked.steps}", "run.batch_size=8",
        "task.name=digits", f"task.args={{hidden: {asked.hidden}}}", "optimizer.lr=0.01",
        f"policy.local_steps={local_steps}", f"slowdown.base_s={asked.compute_s / local_steps}",
        "worker.transports=direct,grpc", "server.insecure=true",
    ]  # fmt: skip
    if asked.deep:
        task = Path(__file__).with_name("deep.py")
        told += [
            f"task.name={task}:Deep", f"task.args={{samples: {asked.samples}}}", f"run.batch_size={asked.samples}",
            "slowdown.base_s=0",
        ]  # fmt: skip
    return [word for setting in (*told, *asked.set, *extra) for word in ("--set", setting)]


def run_once(link: Link, told: list[str], folder: Path) -> dict[str, Any]:
    """One run over the link; its summary."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(prefix: tuple[str, ...], log: Path, *argv: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "PS_LOG__FORMAT": "json", "OMP_NUM_THREADS": "1"}
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", *argv, *told], stdout=file, stderr=file, env=env, cwd=folder
            )
        processes.append(process)
        return process

    try:
        log = folder / "server.log"
        server = start(link.near, log, "paramserver.ps", "--listen", f"{link.host}:0", "--summary", "summary.json")
        address = _address(server, log)
        for rank in range(asked_workers(told)):
            where = ("--rank", str(rank), "--server", address)
            start(link.far, folder / f"worker{rank}.log", "paramserver.worker", *where)
        for process in processes:
            if process.wait(timeout=600):
                raise RuntimeError("\n".join(path.read_text() for path in folder.glob("*.log")))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return json.loads((folder / "summary.json").read_text())


def asked_workers(told: list[str]) -> int:
    """The last word of those that say how many."""
    return int([word for word in told if word.startswith("run.workers=")][-1].partition("=")[2])


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    """Where the server listens, once it does."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and server.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("{") and line.endswith("}") and json.loads(line)["event"] == "listening":
                return str(json.loads(line)["address"])
        time.sleep(0.05)
    raise RuntimeError(f"the server does not listen:\n{log.read_text()}")


def measure(asked: argparse.Namespace, link: Link, mode: str) -> dict[str, Any]:
    """Median seconds a step of both variants, and what else tells them apart."""
    way = "worker.overlap" if asked.deep else "policy.delayed_update"
    variants = {"plain": [*asked.plain, f"{way}=false"], "changed": asked.changed or [f"{way}=true"]}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for _ in range(asked.repeats):
        for name, extra in variants.items():
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(run_once(link, settings(asked, mode, extra), Path(folder)))
    metrics: dict[str, Any] = {"mode": mode, "changed": " ".join(variants["changed"])}
    for name, summaries in found.items():
        steps = [summary["wall_s"] / asked.steps for summary in summaries]
        metrics[f"{name}_step_s"] = round(statistics.median(steps), 4)
        metrics[f"{name}_steps_s"] = [round(step, 4) for step in steps]
        rows = summaries[-1]["workers"]
        metrics[f"{name}_staleness_max"] = max(row["staleness_max"] for row in rows)
        metrics[f"{name}_bytes_sent"] = max(row["bytes_sent"] for row in rows)
        metrics[f"{name}_contributions"] = [row["contributions"] for row in rows]
        metrics[f"{name}_samples"] = [row["samples"] for row in rows]
    metrics["ratio"] = round(metrics["changed_step_s"] / metrics["plain_step_s"], 3)
    return metrics


def main() -> None:
    asked = arguments()
    # Ended from outside, the namespaces still have to go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = []
    try:
        with slow_link(asked.rate) as link:
            for mode in asked.mode or (["sync"] if asked.deep else ["async", "ssp", "localsgd"]):
                results.append(measure(asked, link, mode))
                if not asked.json:
                    show(results[-1], asked)
    except LinkError as error:
        print(f"SKIPPED: {error}", file=sys.stderr)
        sys.exit(_EXIT_SKIPPED)
    if asked.json:
        print(json.dumps(results))


def show(metrics: dict[str, Any], asked: argparse.Namespace) -> None:
    print(
        f"{metrics['mode']:9} {asked.rate}, {asked.workers} workers: plain {metrics['plain_step_s'] * 1000:.0f} ms a "
        f"step {metrics['plain_steps_s']}, {metrics['changed']} {metrics['changed_step_s'] * 1000:.0f} ms "
        f"{metrics['changed_steps_s']}: {metrics['ratio']:.2f} x; staleness at most "
        f"{metrics['plain_staleness_max']} and {metrics['changed_staleness_max']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
